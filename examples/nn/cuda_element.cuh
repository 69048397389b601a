// SPDX-License-Identifier: Apache-2.0
// Activations of any type in the GPU's kernels, 16 bytes at a time.
#ifndef EXAMPLES_NN_CUDA_ELEMENT_CUH_
#define EXAMPLES_NN_CUDA_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "examples/nn/element.h"

namespace nn::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// Of this thread, in a launch of blocks of kThreads.
__device__ inline size_t ThreadIndex() { return static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; }

template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__half x) { return __half2float(x); }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T FromFloat(float x) {
  if constexpr (sizeof(T) == sizeof(float))
    return x;
  else
    return T(x);
}

// Aligned to 16 bytes, in memory and here.
template <class T>
struct alignas(16) Vector {
  T element[kVector<T>];

  __device__ float operator[](int i) const { return ToFloat(element[i]); }
  __device__ void Set(int i, float x) { element[i] = FromFloat<T>(x); }
};

// Element `i * kVector` of p and those behind it.
template <class T>
__device__ Vector<T> Load(const T* p, size_t i) {
  Vector<T> v;
  *reinterpret_cast<uint4*>(&v) = reinterpret_cast<const uint4*>(p)[i];
  return v;
}
template <class T>
__device__ void Store(T* p, size_t i, const Vector<T>& v) {
  reinterpret_cast<uint4*>(p)[i] = *reinterpret_cast<const uint4*>(&v);
}

// What is loaded or stored 16 bytes at a time has to be.
inline bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// V numbers from an aligned place on.
template <int V>
__device__ void LoadFloats(const float* from, float (&to)[V]) {
  for (int i = 0; i < V; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x;
    to[i + 1] = four.y;
    to[i + 2] = four.z;
    to[i + 3] = four.w;
  }
}

// A NaN stays one.
__device__ inline float Rectified(float x) { return x < 0 ? 0 : x; }

inline unsigned Blocks(size_t count, size_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// fn(T()) for the type T of `element`; what its launch returned.
template <class Fn>
cudaError_t Dispatch(Element element, const Fn& fn) {
  switch (element) {
    case Element::kFloat32:
      fn(float());
      break;
    case Element::kFloat16:
      fn(__half());
      break;
    case Element::kBFloat16:
      fn(__nv_bfloat16());
      break;
  }
  return cudaGetLastError();
}

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_ELEMENT_CUH_
