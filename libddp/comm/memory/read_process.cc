// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/memory/read_process.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "libddp/base/env.h"

namespace ddp {

bool MayReadProcesses() { return ReadEnv(Env::kSingleCopy).value_or("auto") != "off"; }

absl::Status ReadProcess(int rank, pid_t pid, const RangeList& from, const RangeList& to) {
  for (size_t at = 0; at < from.bytes();) {
    size_t there = 0, here = 0;
    char* const source = from.At(at, &there);
    char* const target = to.At(at, &here);
    const iovec remote{source, std::min(there, here)}, local{target, std::min(there, here)};
    const ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n > 0) {
      at += static_cast<size_t>(n);
    } else if (const int error = n == 0 ? EFAULT : errno; error == ESRCH) {
      return absl::NotFoundError(absl::StrCat("rank ", rank, " (process ", pid, ") has ended"));
    } else if (error == EPERM || error == ENOSYS) {
      return absl::PermissionDeniedError(absl::StrCat("cannot read the memory of rank ", rank, " (process_vm_readv: ",
                                                      std::strerror(error), "); DDP_SINGLE_COPY=off does without"));
    } else if (error != EINTR) {
      return absl::InternalError(absl::StrCat("cannot read the buffer of rank ", rank,
                                              " (process_vm_readv: ", std::strerror(error),
                                              "); it must stay valid until the operation is done"));
    }
  }
  return absl::OkStatus();
}

}  // namespace ddp
