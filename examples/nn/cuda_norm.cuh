// SPDX-License-Identifier: Apache-2.0
// What the kernels of batch normalisation have in common.
#ifndef EXAMPLES_NN_CUDA_NORM_CUH_
#define EXAMPLES_NN_CUDA_NORM_CUH_

#include <type_traits>

#include "examples/nn/check.h"
#include "examples/nn/cuda_element.cuh"
#include "examples/nn/cuda_image_kernels.h"

namespace nn::cuda {

// The share by which running statistics move, and towards what.
struct Momentum {
  float share;
  RunningMoments running;

  __device__ void Move(int channel, float mean, float variance, float count) const {
    if (share == 0) return;
    running.mean[channel] += share * (mean - running.mean[channel]);
    running.variance[channel] += share * (variance * (count / (count - 1)) - running.variance[channel]);
  }
};

inline void CheckAligned(const BatchNormApply& apply) {
  for (const float* const numbers : {apply.mean, apply.rstd, apply.weight, apply.bias}) {
    NN_CHECK(IsAligned(numbers));
  }
}

// y = scale x + shift, before its ReLU, of a thread's channels. The same numbers in both directions.
template <int V>
struct Normalised {
  float scale[V], shift[V];

  __device__ void Set(const BatchNormApply& apply, size_t channel0) {
    float mean[V], rstd[V], weight[V], bias[V];
    LoadFloats(apply.mean + channel0, mean);
    LoadFloats(apply.rstd + channel0, rstd);
    LoadFloats(apply.weight + channel0, weight);
    LoadFloats(apply.bias + channel0, bias);
    for (int i = 0; i < V; ++i) {
      Set(i, mean[i], apply.eps > 0 ? rsqrtf(rstd[i] + apply.eps) : rstd[i], weight[i], bias[i]);
    }
  }
  __device__ void Set(int i, float mean, float rstd, float weight, float bias) {
    scale[i] = rstd * weight;
    shift[i] = fmaf(-mean, scale[i], bias);
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

// The largest number that becomes 0 in T: where T has 16 bits, half of its smallest number above 0.
template <class T>
constexpr float kBecomesZero = std::is_same_v<T, float>    ? 0
                               : std::is_same_v<T, __half> ? 0x1p-25f
                                                           : 0x1p-134f;

// A gradient of y behind its ReLU.
template <class T>
__device__ float Masked(float gradient, float y) {
  return y <= kBecomesZero<T> ? 0 : gradient;
}

// Which vector of x lies where vector i of the output does; false where x has no such channel.
template <class T>
__device__ bool FromShortcut(const Shortcut& s, size_t i, size_t* at) {
  if (s.stride == 1 && s.in.channels == s.out.channels) {
    *at = i;
    return true;
  }
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

// What a shortcut, if there is one, adds to vector `at` of the output.
template <class T>
__device__ Vector<T> Beside(bool has_shortcut, const Shortcut& shortcut, size_t at) {
  size_t from = at;
  if (!has_shortcut || !FromShortcut<T>(shortcut, at, &from)) return {};
  return Load(static_cast<const T*>(shortcut.x), from);
}

template <class T>
__device__ ReluBits PassedOf(const Vector<T>& y) {
  unsigned bits = 0;
  for (int i = 0; i < kVector<T>; ++i) bits |= (y[i] <= 0 ? 0u : 1u) << i;
  return static_cast<ReluBits>(bits);
}

template <class T>
__device__ Vector<T> OutputOf(const Normalised<kVector<T>>& normalised, const Vector<T>& in, const Vector<T>& beside,
                              bool relu) {
  Vector<T> out;
  for (int i = 0; i < kVector<T>; ++i) {
    const float v = normalised(i, in[i]) + beside[i];
    out.Set(i, relu ? Rectified(v) : v);
  }
  return out;
}

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_NORM_CUH_
