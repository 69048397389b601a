// SPDX-License-Identifier: Apache-2.0
// Reading the memory of another process of this host.
#ifndef LIBDDP_COMM_MEMORY_READ_PROCESS_H_
#define LIBDDP_COMM_MEMORY_READ_PROCESS_H_

#include <sys/types.h>

#include "absl/status/status.h"
#include "libddp/comm/base/range_list.h"

namespace ddp {

// Whether DDP_SINGLE_COPY lets us try.
bool MayReadProcesses();

// Copies `from`, addresses in process `pid`, which plays `rank`, to `to`, of the same length. PermissionDenied where
// the host does not allow it (a container's seccomp profile, Yama), NotFound where the process has ended.
absl::Status ReadProcess(int rank, pid_t pid, const RangeList& from, const RangeList& to);

}  // namespace ddp

#endif  // LIBDDP_COMM_MEMORY_READ_PROCESS_H_
