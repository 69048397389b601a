// SPDX-License-Identifier: Apache-2.0
// Element-wise passes of the CPU layers and optimizers, for the widest vectors of the processor.
#ifndef EXAMPLES_NN_KERNELS_H_
#define EXAMPLES_NN_KERNELS_H_

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "examples/nn/host_device.h"

namespace nn {

// sums[j] += dy[i][j] over all rows i of the row-major dy [rows, width].
void SumRows(const float* dy, size_t rows, size_t width, float* sums);

// First sets dy[i][j] = y[i][j] <= 0 ? 0 : dy[i][j], then does the same as SumRows, in one pass. y has dy's shape.
void MaskAndSumRows(const float* y, float* dy, size_t rows, size_t width, float* sums);

// y = max(0, y). NaN stays NaN, here and below.
void Relu(float* y, size_t count);

// y = max(0, x + y).
void AddRelu(const float* x, float* y, size_t count);

// dy = y <= 0 ? 0 : dy.
void MaskPositive(const float* y, float* dy, size_t count);

// y += x.
void Add(const float* x, float* y, size_t count);

// Windows of height x width pixels in images stored as [planes][in_height][in_width][block], every `stride` pixels (0:
// adjacent), the first one `padding` pixels outside of the image on each side. Windows consist of the pixels that are
// within the image. Pixels at the right and the bottom that do not fill a window are ignored.
struct Windows {
  size_t planes, in_height, in_width, height, width, block;
  size_t stride = 0;
  size_t padding = 0;  // at most half of a window

  bool adjacent() const { return stride == 0 && padding == 0; }
  size_t step(size_t size) const { return stride == 0 ? size : stride; }
  size_t lines() const { return (in_height + 2 * padding - height) / step(height) + 1; }
  size_t columns() const { return (in_width + 2 * padding - width) / step(width) + 1; }
};

// y = the largest number of each window, or NaN if the window has one; with `relu`, max(0, .) of that. `which` has y's
// size. It receives the index of the chosen pixel within the window, for the backward pass.
void MaxPool(const Windows& windows, bool relu, const float* x, float* y, int32_t* which);

// dx = the sum of the gradients dy of all windows that have chosen the pixel.
void MaxPoolBackward(const Windows& windows, bool relu, const float* y, const int32_t* which, const float* dy,
                     float* dx);

// Returns the sum of the squares of x, computed in float64. It has the same bits for every vector width.
double SumSquares(const float* x, size_t count);

// Returns the factor that scales gradients with this norm to a norm of at most `clip_norm`.
NN_HOST_DEVICE inline double ClipFactor(double clip_norm, double norm) {
  const double factor = clip_norm / (norm + 1e-6);
  return norm <= DBL_MAX && factor < 1 ? factor : 1;  // a NaN is not below 1
}

// Words in the GPU's memory that a step reads when it runs. Each may be null.
struct StepWords {
  // Factors of each gradient: the inverse of the loss scale, and the clipping factor.
  const float* inv_scale = nullptr;
  const float* clip = nullptr;
  // If one of them is not 0, the step changes nothing. One is a gradient scaler's, the other the reduction's.
  const uint32_t* found_inf = nullptr;
  const uint32_t* skip_step = nullptr;
};

struct SgdCoefficients {
  float lr, momentum, weight_decay;
  float grad_scale;  // each gradient is first multiplied by it
};

// value -= lr * (grad + weight_decay * value). Does not use `momentum`.
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
  float keep;  // each value is first multiplied by it: 1, or less for decoupled weight decay
};

// value *= keep;  g = grad + weight_decay * value;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) *
// g^2; value -= step_size * m / (sqrt(v) * rsqrt_correction + eps).
void AdamPass(const AdamCoefficients& coefficients, size_t count, const float* grad, float* value, float* m, float* v);

}  // namespace nn

#endif  // EXAMPLES_NN_KERNELS_H_
