// SPDX-License-Identifier: Apache-2.0
// Element types in kernels: vectors of them, and conversions by way of the type that is computed in.
#ifndef LIBDDP_DEVICE_CUDA_CONVERT_H_
#define LIBDDP_DEVICE_CUDA_CONVERT_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace ddp::cuda {
namespace {  // each file's own: nvcc exports what is not

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T v[kCount];
};

// The type that is scaled.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ float Widen(float x) { return x; }
__device__ float Widen(__half x) { return __half2float(x); }
__device__ float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ double Widen(double x) { return x; }
// One function, not specialisations, which nvcc would export.
template <typename T>
__device__ T Narrow(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}
template <typename T>
__device__ T Narrow(double x) {
  return x;
}

}  // namespace
}  // namespace ddp::cuda

#endif  // LIBDDP_DEVICE_CUDA_CONVERT_H_
