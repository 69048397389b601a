// SPDX-License-Identifier: Apache-2.0
// GPU memory.
#ifndef EXAMPLES_NN_CUDA_MEMORY_H_
#define EXAMPLES_NN_CUDA_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "absl/strings/str_cat.h"
#include "examples/nn/cuda_matmul.h"

namespace nn::cuda {

// Allocates memory that is zeroed in the order of `stream`. Throws DeviceError.
template <class T = void>
std::shared_ptr<T> AllocateBytes(size_t bytes, cudaStream_t stream) {
  void* data = nullptr;
  Check(cudaMalloc(&data, bytes), absl::StrCat("cudaMalloc of ", bytes, " bytes").c_str());
  std::shared_ptr<T> memory(static_cast<T*>(data), [](T* p) { cudaFree(p); });
  Check(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync");
  return memory;
}

inline std::shared_ptr<float> AllocateFloats(size_t count, cudaStream_t stream) {
  return AllocateBytes<float>(count * sizeof(float), stream);
}

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_MEMORY_H_
