// SPDX-License-Identifier: Apache-2.0
// One pass over an array in host memory: the sum of its squares or magnitudes, or the largest magnitude.
#ifndef LIBDDP_DEVICE_CPU_NORM_H_
#define LIBDDP_DEVICE_CPU_NORM_H_

#include "ddp/types.h"
#include "libddp/device/buffer_ops.h"

namespace ddp {

// kL1: sum |x|; kL2: sum x^2; kMax: max |x|, NaN if one is. In float64; the same bits on every processor.
double CpuNormPart(const Buffer& buffer, NormKind kind);

}  // namespace ddp

#endif  // LIBDDP_DEVICE_CPU_NORM_H_
