// SPDX-License-Identifier: Apache-2.0
// The choice of a kernel for this processor. Internal to CpuReduce.
#ifndef LIBDDP_DEVICE_CPU_REDUCE_KERNELS_H_
#define LIBDDP_DEVICE_CPU_REDUCE_KERNELS_H_

#include "libddp/device/cpu_reduce.h"

namespace ddp {

// For floating-point types that convert to each other; null if they do not.
CpuReduce::Kernel ChooseFloatKernel(DType in, DType out, ReduceOp op);

// For integer types, which are not converted; null for any other type.
CpuReduce::Kernel ChooseIntKernel(DType dtype, ReduceOp op);

}  // namespace ddp

#endif  // LIBDDP_DEVICE_CPU_REDUCE_KERNELS_H_
