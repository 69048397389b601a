// SPDX-License-Identifier: Apache-2.0
#include "libddp/device/host_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "libddp/base/page.h"

namespace ddp {

absl::StatusOr<std::shared_ptr<void>> AllocateHost(size_t bytes) {
  // Huge pages begin at multiples of their size: map more than is needed and begin there.
  const size_t mapped = bytes >= kHugePage ? bytes + kHugePage : bytes;
  void* const hole = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (hole == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory left for ", bytes, " bytes (mmap: ", std::strerror(errno), ")"));
  }
  char* data = static_cast<char*>(hole);
  if (bytes >= kHugePage) {
    data += (kHugePage - reinterpret_cast<uintptr_t>(data) % kHugePage) % kHugePage;
    madvise(data, bytes, MADV_HUGEPAGE);
  }
  return std::shared_ptr<void>(data, [hole, mapped](void*) { munmap(hole, mapped); });
}

}  // namespace ddp
