// SPDX-License-Identifier: Apache-2.0
// Low-rank compression on the CPU: see low_rank.h.
#ifndef LIBDDP_DEVICE_CPU_LOW_RANK_H_
#define LIBDDP_DEVICE_CPU_LOW_RANK_H_

#include "absl/types/span.h"
#include "ddp/types.h"
#include "libddp/device/low_rank.h"

namespace ddp {

// `dtype`: of gradients and messages; float32 or a 16-bit float. Sums are formed in an order that depends on the shapes
// alone.
void CpuLowRank(LowRankPass pass, DType dtype, const LowRankStep& step, absl::Span<const LowRankMatrix> matrices);

}  // namespace ddp

#endif  // LIBDDP_DEVICE_CPU_LOW_RANK_H_
