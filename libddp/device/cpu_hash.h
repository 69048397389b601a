// SPDX-License-Identifier: Apache-2.0
// Hashes of arrays in host memory.
#ifndef LIBDDP_DEVICE_CPU_HASH_H_
#define LIBDDP_DEVICE_CPU_HASH_H_

#include <cstddef>
#include <cstdint>

namespace ddp {

// As hash_rule.h defines it. `data` needs no alignment. Thread-safe.
uint64_t CpuHash(const void* data, size_t bytes);

}  // namespace ddp

#endif  // LIBDDP_DEVICE_CPU_HASH_H_
