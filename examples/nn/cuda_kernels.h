// SPDX-License-Identifier: Apache-2.0
// Launches the element-wise passes of the GPU's layers and optimizers. All are asynchronous on `stream`.
#ifndef EXAMPLES_NN_CUDA_KERNELS_H_
#define EXAMPLES_NN_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "examples/nn/element.h"
#include "examples/nn/kernels.h"
#include "examples/nn/loss_options.h"

namespace nn::cuda {

// `logits` are row-major [rows, classes] of type `element`; computed in float32. See nn::SoftmaxCrossEntropy.
cudaError_t CrossEntropy(Element element, const void* logits, const int32_t* labels, int rows, int classes,
                         const LossOptions& options, void* dlogits, const LossRing& loss, cudaStream_t stream);
cudaError_t CountHits(Element element, const void* logits, const int32_t* labels, int rows, int classes, int64_t* hits,
                      cudaStream_t stream);

// sums[j] = (or with `accumulate` +=) sum of dy[i][j] over i.
cudaError_t SumRows(Element element, const void* dy, int rows, int width, bool accumulate, float* sums,
                    cudaStream_t stream);
// dy[i] = y[i] > 0 ? dy[i] : 0.
cudaError_t Mask(Element element, const void* y, void* dy, size_t count, cudaStream_t stream);

// y = x, converted to another type, for two ranges; the second may be empty.
struct CastRange {
  const float* x;
  void* y;
  size_t count;
};
cudaError_t Cast(Element element, const CastRange& first, const CastRange& second, cudaStream_t stream);

// y = (x + y) * scale.
cudaError_t AddScaled(const float* x, float* y, size_t count, float scale, cudaStream_t stream);

// What depends on an optimizer's learning rate. In the GPU's memory, because a graph that is replayed keeps the
// arguments of its kernels.
struct OptimizerRates {
  double lr;
  float sgd_lr;  // lr, as Sgd uses it
  float keep;    // see AdamCoefficients
};

// The state of an optimizer in the GPU's memory, besides its moments.
struct OptimizerState {
  OptimizerRates rates;
  double steps;                       // steps that were not skipped
  float step_size, rsqrt_correction;  // Adam's, for the running step
  // The clipping factor; while it is computed, the partial sums of squares and how many blocks are done.
  static constexpr unsigned kClipBlocks = 256;
  float clip;
  unsigned clip_blocks_done;
  double squares[kClipBlocks];
};

// state->clip = the factor that, after grad_scale and inv_scale, scales the gradients to a norm of at most clip_norm.
cudaError_t Clip(double clip_norm, float grad_scale, size_t count, const float* grad, OptimizerState* state,
                 const StepWords& words, cudaStream_t stream);

cudaError_t SetRates(const OptimizerRates& rates, OptimizerState* state, cudaStream_t stream);

// See nn::SgdPass and MomentumPass. Without momentum if m is null. Counts the step. The rate is the state's.
cudaError_t Sgd(const SgdCoefficients& coefficients, size_t count, const float* grad, float* value, float* m,
                OptimizerState* state, const StepWords& words, cudaStream_t stream);

struct AdamBetas {
  double beta1, beta2;
};
// Counts the step, computes the coefficients that depend on the count, and runs nn::AdamPass with them. The rates are
// the state's.
cudaError_t Adam(const AdamBetas& betas, const AdamCoefficients& coefficients, size_t count, const float* grad,
                 float* value, float* m, float* v, OptimizerState* state, const StepWords& words, cudaStream_t stream);

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_KERNELS_H_
