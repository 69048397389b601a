// SPDX-License-Identifier: Apache-2.0
// The kernels of capture_step.
#ifndef EXAMPLES_CAPTURE_STEP_KERNELS_H_
#define EXAMPLES_CAPTURE_STEP_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

// grad = weight - target.
void SubmitGradient(const float* weight, float target, float* grad, int count, cudaStream_t stream);
// weight -= *rate * grad, unless *skip_step is not 0. All pointers are the GPU's.
void SubmitDescent(const float* grad, const float* rate, const uint32_t* skip_step, float* weight, int count,
                   cudaStream_t stream);

#endif  // EXAMPLES_CAPTURE_STEP_KERNELS_H_
