// The element-wise passes of the CPU layers and optimizers, for the widest vectors that the processor has.
#ifndef EXAMPLES_NN_KERNELS_H_
#define EXAMPLES_NN_KERNELS_H_

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "examples/nn/host_device.h"

namespace nn {

// sums[j] += dy[i][j] over all rows i of the row-major dy [rows, width].
void SumRows(const float* dy, size_t rows, size_t width, float* sums);

// The same after dy[i][j] = y[i][j] > 0 ? dy[i][j] : 0, in the same pass. y has dy's shape.
void MaskAndSumRows(const float* y, float* dy, size_t rows, size_t width, float* sums);

// y = max(0, y).
void Relu(float* y, size_t count);

// y = max(0, x + y).
void AddRelu(const float* x, float* y, size_t count);

// dy = y > 0 ? dy : 0.
void MaskPositive(const float* y, float* dy, size_t count);

// y += x.
void Add(const float* x, float* y, size_t count);

// The sum of the squares of x, in float64: the same bits whatever the width of the vectors.
double SumSquares(const float* x, size_t count);

// What gradients of this norm are multiplied by for a norm of at most `clip_norm`.
NN_HOST_DEVICE inline double ClipFactor(double clip_norm, double norm) {
  const double factor = clip_norm / (norm + 1e-6);
  return norm <= DBL_MAX && factor < 1 ? factor : 1;  // a NaN is not below 1
}

// What a step on a GPU finds when it gets there, in the GPU's memory. Each may be null.
struct StepWords {
  // Which each gradient is multiplied by: what undoes the loss's scale, and what clips.
  const float* inv_scale = nullptr;
  const float* clip = nullptr;
  // Where one is not 0, the step changes nothing: of a gradient scaler, and of the reduction.
  const uint32_t* found_inf = nullptr;
  const uint32_t* skip_step = nullptr;
};

struct SgdCoefficients {
  float lr, momentum, weight_decay;
  float grad_scale;  // which each gradient is multiplied by first
};

// value -= lr * (grad + weight_decay * value). `momentum` is not read.
void SgdPass(const SgdCoefficients& coefficients, size_t count, const float* grad, float* value);

// m = momentum * m + grad + weight_decay * value;  value -= lr * m.
void MomentumPass(const SgdCoefficients& coefficients, size_t count, const float* grad, float* value, float* m);

struct AdamCoefficients {
  float step_size;         // lr / (1 - beta1^t)
  float rsqrt_correction;  // 1 / sqrt(1 - beta2^t)
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps, weight_decay;
  float grad_scale;
  float keep;  // what each value is multiplied by first: 1, or less for decoupled weight decay
};

// value *= keep;  g = grad + weight_decay * value;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) *
// g^2; value -= step_size * m / (sqrt(v) * rsqrt_correction + eps).
void AdamPass(const AdamCoefficients& coefficients, size_t count, const float* grad, float* value, float* m, float* v);

}  // namespace nn

#endif  // EXAMPLES_NN_KERNELS_H_
