// SPDX-License-Identifier: Apache-2.0
#include "examples/capture_step_kernels.h"

namespace {

constexpr int kThreads = 256;

__global__ void Gradient(const float* weight, float target, float* grad, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) grad[i] = weight[i] - target;
}

__global__ void Descent(const float* grad, const float* rate, const uint32_t* skip_step, float* weight, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count && *skip_step == 0) weight[i] -= *rate * grad[i];
}

}  // namespace

void SubmitGradient(const float* weight, float target, float* grad, int count, cudaStream_t stream) {
  Gradient<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(weight, target, grad, count);
}

void SubmitDescent(const float* grad, const float* rate, const uint32_t* skip_step, float* weight, int count,
                   cudaStream_t stream) {
  Descent<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(grad, rate, skip_step, weight, count);
}
