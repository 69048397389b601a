// SPDX-License-Identifier: Apache-2.0
// Private host memory for large arrays.
#ifndef LIBDDP_DEVICE_HOST_MEMORY_H_
#define LIBDDP_DEVICE_HOST_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"

namespace ddp {

// `bytes` (> 0) bytes of zeros, page-aligned, on huge pages where the kernel has them. ResourceExhausted where there is
// no memory.
absl::StatusOr<std::shared_ptr<void>> AllocateHost(size_t bytes);

}  // namespace ddp

#endif  // LIBDDP_DEVICE_HOST_MEMORY_H_
