// The element-wise passes of the GPU's layers and optimizers, launched. All are asynchronous on `stream`.
#ifndef EXAMPLES_NN_CUDA_KERNELS_H_
#define EXAMPLES_NN_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "examples/nn/kernels.h"

namespace nn::cuda {

// Row-major [rows, classes]. See nn::SoftmaxCrossEntropy.
cudaError_t CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float label_smoothing,
                         float grad_scale, float* dlogits, double* loss, cudaStream_t stream);
cudaError_t CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits,
                      cudaStream_t stream);

// sums[j] = (or with `accumulate` +=) sum of dy[i][j] over i.
cudaError_t SumRows(const float* dy, int rows, int width, bool accumulate, float* sums, cudaStream_t stream);
// dy[i] = y[i] > 0 ? dy[i] : 0.
cudaError_t Mask(const float* y, float* dy, size_t count, cudaStream_t stream);

// See nn::SgdPass and MomentumPass; m null: without momentum. `skip`, unless null: nothing changes where it is not 0.
cudaError_t Sgd(const SgdCoefficients& coefficients, size_t count, const float* grad, float* value, float* m,
                const uint32_t* skip, cudaStream_t stream);

// What Adam keeps between steps beside its moments, in the GPU's memory.
struct AdamState {
  double steps;                       // those that were not skipped
  float step_size, rsqrt_correction;  // of the step that runs
};
struct AdamRates {
  double lr, beta1, beta2;
};
// Counts a step, and computes what depends on the count; then nn::AdamPass with that.
cudaError_t Adam(const AdamRates& rates, const AdamCoefficients& coefficients, size_t count, const float* grad,
                 float* value, float* m, float* v, AdamState* state, const uint32_t* skip, cudaStream_t stream);

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_KERNELS_H_
