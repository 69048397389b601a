// SPDX-License-Identifier: Apache-2.0
// Block-scaled 8-bit numbers (block_rule.h) in host memory, with the vector width chosen at run time.
#ifndef LIBDDP_DEVICE_CPU_BLOCKS_H_
#define LIBDDP_DEVICE_CPU_BLOCKS_H_

#include "libddp/device/block_rule.h"

namespace ddp {

// The same bits for every vector width, but that a NaN may be any NaN. `in` and `out` do not overlap, except that in
// kReduce `out` may be an input. Arrays need the alignment of their elements only, groups that of a float32.
void CpuRunBlocks(const blocks::Pass& pass);

}  // namespace ddp

#endif  // LIBDDP_DEVICE_CPU_BLOCKS_H_
