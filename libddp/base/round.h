// SPDX-License-Identifier: Apache-2.0
// Division and rounding of sizes.
#ifndef LIBDDP_BASE_ROUND_H_
#define LIBDDP_BASE_ROUND_H_

#include <cstddef>

namespace ddp {

// n / by, rounded up.
inline constexpr size_t CeilDiv(size_t n, size_t by) { return (n + by - 1) / by; }

// The smallest multiple of `to` that is not below n.
inline constexpr size_t RoundUp(size_t n, size_t to) { return CeilDiv(n, to) * to; }

}  // namespace ddp

#endif  // LIBDDP_BASE_ROUND_H_
