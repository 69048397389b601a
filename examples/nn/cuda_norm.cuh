// SPDX-License-Identifier: Apache-2.0
// What the kernels of batch normalisation have in common.
#ifndef EXAMPLES_NN_CUDA_NORM_CUH_
#define EXAMPLES_NN_CUDA_NORM_CUH_

#include "examples/nn/cuda_element.cuh"
#include "examples/nn/cuda_image_kernels.h"

namespace nn::cuda {

// The share by which running statistics move, and towards what.
struct Momentum {
  float share;
  RunningMoments running;

  __device__ void Move(int channel, float mean, float variance, float count) const {
    running.mean[channel] += share * (mean - running.mean[channel]);
    running.variance[channel] += share * (variance * (count / (count - 1)) - running.variance[channel]);
  }
};

// y = scale x + shift, before its ReLU, of a thread's channels. The same numbers in both directions.
template <int V>
struct Normalised {
  float scale[V], shift[V];

  __device__ void Set(const BatchNormApply& apply, size_t channel0) {
    for (int i = 0; i < V; ++i) {
      const size_t c = channel0 + i;
      Set(i, apply, c, apply.mean[c], apply.eps > 0 ? rsqrtf(apply.rstd[c] + apply.eps) : apply.rstd[c]);
    }
  }
  __device__ void Set(int i, const BatchNormApply& apply, size_t channel, float mean, float rstd) {
    scale[i] = rstd * apply.weight[channel];
    shift[i] = fmaf(-mean, scale[i], apply.bias[channel]);
  }
  __device__ float operator()(int i, float x) const { return fmaf(x, scale[i], shift[i]); }
};

// dx = weight rstd (dy - mean(dy) - xhat mean(dy xhat)), as scale dy + slope x + constant. sum_dy and sum_dy_xhat: of
// `count` values.
template <int V>
struct InputGrad {
  float slope[V], constant[V];

  __device__ void Set(int i, float scale, float mean, float rstd, float sum_dy, float sum_dy_xhat, float count) {
    slope[i] = -scale * rstd * (sum_dy_xhat / count);
    constant[i] = -scale * (sum_dy / count) - slope[i] * mean;
  }
  __device__ float operator()(int i, float scale, float dy, float x) const {
    return fmaf(scale, dy, fmaf(slope[i], x, constant[i]));
  }
};

// A gradient of y behind its ReLU.
template <class T>
__device__ float Masked(float gradient, float y) {
  return ToFloat(FromFloat<T>(y)) <= 0 ? 0 : gradient;
}

// Which vector of x lies where vector i of the output does; false where x has no such channel.
template <class T>
__device__ bool FromShortcut(const Shortcut& s, size_t i, size_t* at) {
  const int in_vectors = s.in.channels / kVector<T>, out_vectors = s.out.channels / kVector<T>;
  const int vector = static_cast<int>(i % out_vectors);
  if (vector >= in_vectors) return false;
  size_t pixel = i / out_vectors;
  const int column = static_cast<int>(pixel % s.out.width);
  pixel /= s.out.width;
  const int line = static_cast<int>(pixel % s.out.height);
  const size_t image = pixel / s.out.height;
  *at = ((image * s.in.height + line * s.stride) * s.in.width + column * s.stride) * in_vectors + vector;
  return true;
}

// Vector `at` of the output, of this one of the input.
template <class T>
__device__ Vector<T> OutputOf(const Normalised<kVector<T>>& normalised, const Vector<T>& in, bool has_shortcut,
                              const Shortcut& shortcut, bool relu, size_t at) {
  Vector<T> beside = {}, out;
  size_t from = at;
  if (has_shortcut && FromShortcut<T>(shortcut, at, &from)) beside = Load(static_cast<const T*>(shortcut.x), from);
  for (int i = 0; i < kVector<T>; ++i) {
    float v = normalised(i, in[i]);
    if (has_shortcut) v += beside[i];
    out.Set(i, relu ? Rectified(v) : v);
  }
  return out;
}

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_NORM_CUH_
