// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cuda_image_kernels.h"

#include <type_traits>

#include "examples/nn/check.h"
#include "examples/nn/cuda_element.cuh"

namespace nn::cuda {
namespace {

// Index `i` taken apart, the last dimension first. Of 32 bits: division by a number of 64 takes as long as all the
// rest.
__device__ int Take(unsigned* i, int dimension) {
  const unsigned all = *i;
  *i = all / dimension;
  return static_cast<int>(all - *i * dimension);
}

template <class T>
__global__ void __launch_bounds__(kThreads) PackImagesKernel(const float* x, size_t pixels, ImagePacking p, T* y) {
  const size_t pixel = ThreadIndex();
  if (pixel >= pixels) return;
  unsigned image = pixel;
  const int column = Take(&image, p.width) * p.fold - p.padding, line = Take(&image, p.height) * p.fold - p.padding;
  const size_t plane = static_cast<size_t>(p.in.height) * p.in.width;
  const float* const from = x + image * plane * p.in.channels;
  for (int first = 0; first < p.padded; first += kVector<T>) {
    Vector<T> out;
    for (int i = 0; i < kVector<T>; ++i) {
      const int part = (first + i) / p.in.channels, channel = (first + i) % p.in.channels;
      const int row = line + part / p.fold, at = column + part % p.fold;
      const bool has = part < p.fold * p.fold && row >= 0 && row < p.in.height && at >= 0 && at < p.in.width;
      out.Set(i, has ? from[channel * plane + row * p.in.width + at] : 0);
    }
    Store(y, (pixel * p.padded + first) / kVector<T>, out);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    PackWeightKernel(const float* weight, size_t count, WeightShape s, T* packed) {
  unsigned i = ThreadIndex();
  if (i >= count) return;
  T* const to = packed + i;
  const int taps = s.taps(), c = Take(&i, s.padded), tap = Take(&i, taps * taps);
  const int part = c / s.channels, channel = c % s.channels;
  const int row = tap / taps * s.fold + part / s.fold, column = tap % taps * s.fold + part % s.fold;
  const bool has = part < s.fold * s.fold && row < s.kernel && column < s.kernel;
  *to = FromFloat<T>(
      has ? weight[((static_cast<size_t>(i) * s.channels + channel) * s.kernel + row) * s.kernel + column] : 0);
}

// Of single taps, which lie as they do in float32.
template <class T>
__global__ void __launch_bounds__(kThreads) PackOneTapKernel(const float* weight, size_t vectors, T* packed) {
  const size_t i = ThreadIndex();
  if (i >= vectors) return;
  float numbers[kVector<T>];
  LoadFloats(weight + i * kVector<T>, numbers);
  Vector<T> out;
  for (int k = 0; k < kVector<T>; ++k) out.Set(k, numbers[k]);
  Store(packed, i, out);
}
template <class T>
__global__ void __launch_bounds__(kThreads)
    UnpackOneTapKernel(const T* packed, size_t vectors, bool accumulate, float* grad) {
  const size_t i = ThreadIndex();
  if (i >= vectors) return;
  float* const to = grad + i * kVector<T>;
  const Vector<T> in = Load(packed, i);
  for (int k = 0; k < kVector<T>; k += 4) {
    float4 sum = accumulate ? *reinterpret_cast<const float4*>(to + k) : float4();
    sum.x += in[k];
    sum.y += in[k + 1];
    sum.z += in[k + 2];
    sum.w += in[k + 3];
    *reinterpret_cast<float4*>(to + k) = sum;
  }
}

// Of several taps and channels that need no padding. A thread for all taps of an output and a channel.
template <class T>
__global__ void __launch_bounds__(kThreads)
    PackTapsKernel(const float* weight, size_t count, int taps, int channels, T* packed) {
  const unsigned i = ThreadIndex();
  if (i >= count) return;
  const float* const from = weight + static_cast<size_t>(i) * taps;
  T* const to = packed + static_cast<size_t>(i / channels) * taps * channels + i % channels;
  for (int tap = 0; tap < taps; ++tap) to[tap * channels] = FromFloat<T>(from[tap]);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    UnpackGradKernel(const T* packed, size_t count, WeightShape s, bool accumulate, float* grad) {
  unsigned i = ThreadIndex();
  if (i >= count) return;
  float* const to = grad + i;
  const int column = Take(&i, s.kernel), row = Take(&i, s.kernel), channel = Take(&i, s.channels), taps = s.taps();
  const int part = row % s.fold * s.fold + column % s.fold;
  const size_t tap = (static_cast<size_t>(i) * taps + row / s.fold) * taps + column / s.fold;
  *to = ToFloat(packed[tap * s.padded + part * s.channels + channel]) + (accumulate ? *to : 0);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    AddBiasKernel(T* y, size_t vectors, int channel_vectors, const float* bias, bool relu) {
  const size_t i = ThreadIndex();
  if (i >= vectors) return;
  const float* const own = bias + i % channel_vectors * kVector<T>;
  Vector<T> v = Load(y, i);
  for (int k = 0; k < kVector<T>; ++k) {
    const float sum = v[k] + own[k];
    v.Set(k, relu ? Rectified(sum) : sum);
  }
  Store(y, i, v);
}

constexpr int kTile = 32;

// Matrices of `lines` by `columns`, one for each x of the grid, to their transposes.
template <class T>
__global__ void TransposeKernel(const T* x, int lines, int columns, T* y) {
  __shared__ T tile[kTile][kTile + 1];
  const size_t first = static_cast<size_t>(blockIdx.x) * lines * columns;
  const int line0 = blockIdx.y * kTile, column0 = blockIdx.z * kTile;
  for (int r = threadIdx.y; r < kTile && line0 + r < lines; r += blockDim.y) {
    const int column = column0 + threadIdx.x;
    if (column < columns) tile[r][threadIdx.x] = x[first + static_cast<size_t>(line0 + r) * columns + column];
  }
  __syncthreads();
  for (int r = threadIdx.y; r < kTile && column0 + r < columns; r += blockDim.y) {
    const int line = line0 + threadIdx.x;
    if (line < lines) y[first + static_cast<size_t>(column0 + r) * lines + line] = tile[threadIdx.x][r];
  }
}

cudaError_t Transpose(Element element, const void* x, int count, int lines, int columns, void* y, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const dim3 grid(static_cast<unsigned>(count), Blocks(static_cast<size_t>(lines), kTile),
                    Blocks(static_cast<size_t>(columns), kTile));
    TransposeKernel<T>
        <<<grid, dim3(kTile, 8), 0, stream>>>(static_cast<const T*>(x), lines, columns, static_cast<T*>(y));
  });
}

// fn(index of a vector within x, number of the pixel in the window) for each pixel of window (line, column) that is
// within the image.
template <class T, class Fn>
__device__ void ForEachInWindow(const PoolShape& s, size_t image, int line, int column, int vector, const Fn& fn) {
  const int vectors = s.in.channels / kVector<T>;
  const int top = line * s.step_height - s.padding, left = column * s.step_width - s.padding;
  for (int h = 0; h < s.height; ++h) {
    if (top + h < 0 || top + h >= s.in.height) continue;
    const size_t first = (image * s.in.height + top + h) * s.in.width;
    for (int w = 0; w < s.width; ++w) {
      if (left + w >= 0 && left + w < s.in.width) fn((first + left + w) * vectors + vector, h * s.width + w);
    }
  }
}

// One byte for each element of a vector.
template <class T>
using Bytes = std::conditional_t<kVector<T> == 8, unsigned long long, unsigned>;

template <class T>
__global__ void __launch_bounds__(kThreads) PoolKernel(const T* x, size_t count, PoolShape s, T* y, Bytes<T>* which) {
  constexpr int V = kVector<T>;
  const size_t at = ThreadIndex();
  if (at >= count) return;
  unsigned image = at;
  const int vector = Take(&image, s.out.channels / V), column = Take(&image, s.out.width),
            line = Take(&image, s.out.height);
  const bool max = s.kind == PoolKind::kMax;
  float result[V];
  unsigned char chosen[V];
  for (int i = 0; i < V; ++i) result[i] = max ? -INFINITY : 0;
  bool first = true;
  ForEachInWindow<T>(s, image, line, column, vector, [&](size_t from, int pixel) {
    const Vector<T> v = Load(x, from);
    for (int i = 0; i < V; ++i) {
      if (!max) {
        result[i] += v[i];
      } else if (first || v[i] > result[i] || v[i] != v[i]) {  // a NaN wins
        result[i] = v[i];
        chosen[i] = static_cast<unsigned char>(pixel);
      }
    }
    first = false;
  });
  if (which != nullptr) {
    Bytes<T> bytes = 0;
    for (int i = 0; i < V; ++i) bytes |= static_cast<Bytes<T>>(chosen[i]) << (8 * i);
    which[at] = bytes;
  }
  const float scale = max ? 1 : 1 / static_cast<float>(s.height * s.width);
  Vector<T> out;
  for (int i = 0; i < V; ++i) out.Set(i, s.relu ? Rectified(result[i] * scale) : result[i] * scale);
  Store(y, at, out);
}

// A thread for a pixel and a vector of channels: the sum of the gradients of all windows that have chosen the pixel.
template <class T>
__global__ void __launch_bounds__(kThreads)
    MaxPoolBackwardKernel(const T* y, const Bytes<T>* which, const T* dy, size_t count, PoolShape s, T* dx) {
  constexpr int V = kVector<T>;
  const size_t at = ThreadIndex();
  if (at >= count) return;
  unsigned image = at;
  const int vectors = s.in.channels / V;
  const int vector = Take(&image, vectors), column = Take(&image, s.in.width) + s.padding,
            line = Take(&image, s.in.height) + s.padding;
  const auto first = [](int pixel, int size, int step) { return pixel < size ? 0 : (pixel - size) / step + 1; };
  float sum[V] = {};
  for (int l = first(line, s.height, s.step_height); l < s.out.height && l * s.step_height <= line; ++l) {
    for (int c = first(column, s.width, s.step_width); c < s.out.width && c * s.step_width <= column; ++c) {
      const size_t from = ((static_cast<size_t>(image) * s.out.height + l) * s.out.width + c) * vectors + vector;
      const unsigned here = (line - l * s.step_height) * s.width + column - c * s.step_width;
      const Bytes<T> chosen = which[from];
      const Vector<T> d = Load(dy, from), out = s.relu ? Load(y, from) : Vector<T>();
      for (int i = 0; i < V; ++i) {
        if ((chosen >> (8 * i) & 0xff) == here && !(s.relu && out[i] <= 0)) sum[i] += d[i];
      }
    }
  }
  Vector<T> result;
  for (int i = 0; i < V; ++i) result.Set(i, sum[i]);
  Store(dx, at, result);
}

template <class T>
__global__ void __launch_bounds__(kThreads) AddKernel(const T* x, size_t vectors, T* y) {
  const size_t i = ThreadIndex();
  if (i >= vectors) return;
  const Vector<T> a = Load(x, i);
  Vector<T> sum = Load(y, i);
  for (int k = 0; k < kVector<T>; ++k) sum.Set(k, sum[k] + a[k]);
  Store(y, i, sum);
}

// Of adjacent windows. A thread for a window and a vector of channels; the first of equals gets the gradient.
template <class T>
__global__ void __launch_bounds__(kThreads)
    PoolBackwardKernel(const T* x, const T* y, const T* dy, size_t count, PoolShape s, T* dx) {
  constexpr int V = kVector<T>;
  const size_t at = ThreadIndex();
  if (at >= count) return;
  unsigned image = at;
  const int vector = Take(&image, s.out.channels / V), column = Take(&image, s.out.width),
            line = Take(&image, s.out.height);
  const Vector<T> d = Load(dy, at), out = Load(y, at);
  float grad[V];
  for (int i = 0; i < V; ++i) grad[i] = s.relu && out[i] <= 0 ? 0 : d[i];
  if (s.kind == PoolKind::kAverage) {
    Vector<T> share;
    for (int i = 0; i < V; ++i) share.Set(i, grad[i] / static_cast<float>(s.height * s.width));
    ForEachInWindow<T>(s, image, line, column, vector, [&](size_t to, int) { Store(dx, to, share); });
    return;
  }
  float largest[V] = {};
  size_t where[V] = {};
  bool first = true;
  ForEachInWindow<T>(s, image, line, column, vector, [&](size_t from, int) {
    const Vector<T> v = Load(x, from);
    for (int i = 0; i < V; ++i) {
      if (!first && !(v[i] > largest[i]) && v[i] == v[i]) continue;
      largest[i] = v[i];
      where[i] = from;
    }
    first = false;
  });
  ForEachInWindow<T>(s, image, line, column, vector, [&](size_t to, int) {
    Vector<T> v;
    for (int i = 0; i < V; ++i) v.Set(i, where[i] == to ? grad[i] : 0);
    Store(dx, to, v);
  });
}

__global__ void CountKernel(uint64_t* counter) { ++*counter; }

template <class T>
__global__ void __launch_bounds__(kThreads)
    DropoutKernel(const T* x, size_t count, DropoutChoice choice, uint64_t seed, const uint64_t* pass, T* y) {
  const size_t i = ThreadIndex();
  if (i >= count) return;
  choice.stream = DropoutChoice::StreamOf(seed, *pass);
  y[i] = FromFloat<T>(ToFloat(x[i]) * choice.Factor(i));  // a NaN stays, as in PyTorch
}

// What kernels can Take apart.
size_t Counted(size_t count) {
  NN_CHECK(count <= UINT32_MAX);
  return count;
}

template <class T>
size_t VectorsOf(int rows, const ImageShape& shape) {
  NN_CHECK(shape.channels % kVector<T> == 0);
  return Counted(Pixels(rows, shape) * static_cast<size_t>(shape.channels / kVector<T>));
}

}  // namespace

cudaError_t PackImages(Element element, const float* x, int rows, const ImagePacking& packing, void* y,
                       cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const size_t pixels = Counted(static_cast<size_t>(rows) * static_cast<size_t>(packing.height * packing.width));
    PackImagesKernel<T><<<Blocks(pixels, kThreads), kThreads, 0, stream>>>(x, pixels, packing, static_cast<T*>(y));
  });
}

cudaError_t PackWeight(Element element, const float* weight, const WeightShape& shape, void* packed,
                       cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    T* const to = static_cast<T*>(packed);
    const size_t count = Counted(shape.packed_count());
    if (shape.IsOneTap()) {
      NN_CHECK(IsAligned(weight));
      const size_t vectors = count / kVector<T>;
      PackOneTapKernel<T><<<Blocks(vectors, kThreads), kThreads, 0, stream>>>(weight, vectors, to);
    } else if (shape.fold == 1 && shape.padded == shape.channels) {
      const int taps = shape.taps() * shape.taps();
      const size_t lines = count / static_cast<size_t>(taps);
      PackTapsKernel<T><<<Blocks(lines, kThreads), kThreads, 0, stream>>>(weight, lines, taps, shape.channels, to);
    } else {
      PackWeightKernel<T><<<Blocks(count, kThreads), kThreads, 0, stream>>>(weight, count, shape, to);
    }
  });
}

cudaError_t UnpackGrad(Element element, const void* packed, const WeightShape& shape, bool accumulate, float* grad,
                       cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const T* const from = static_cast<const T*>(packed);
    const size_t count = Counted(shape.count());
    if (shape.IsOneTap()) {
      NN_CHECK(IsAligned(grad));
      const size_t vectors = count / kVector<T>;
      UnpackOneTapKernel<T><<<Blocks(vectors, kThreads), kThreads, 0, stream>>>(from, vectors, accumulate, grad);
    } else {
      UnpackGradKernel<T><<<Blocks(count, kThreads), kThreads, 0, stream>>>(from, count, shape, accumulate, grad);
    }
  });
}

cudaError_t AddBias(Element element, void* y, size_t pixels, int channels, const float* bias, bool relu,
                    cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const int channel_vectors = channels / kVector<T>;
    const size_t vectors = pixels * static_cast<size_t>(channel_vectors);
    AddBiasKernel<T>
        <<<Blocks(vectors, kThreads), kThreads, 0, stream>>>(static_cast<T*>(y), vectors, channel_vectors, bias, relu);
  });
}

cudaError_t Flatten(Element element, const void* x, int rows, const ImageShape& shape, void* y, cudaStream_t stream) {
  return Transpose(element, x, rows, shape.height * shape.width, shape.channels, y, stream);
}

cudaError_t Unflatten(Element element, const void* x, int rows, const ImageShape& shape, void* y, cudaStream_t stream) {
  return Transpose(element, x, rows, shape.channels, shape.height * shape.width, y, stream);
}

cudaError_t Pool(Element element, const void* x, int rows, const PoolShape& shape, void* y, uint8_t* which,
                 cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const size_t count = VectorsOf<T>(rows, shape.out);
    PoolKernel<T><<<Blocks(count, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(x), count, shape, static_cast<T*>(y), reinterpret_cast<Bytes<T>*>(which));
  });
}

cudaError_t PoolBackward(Element element, const void* x, const void* y, const uint8_t* which, const void* dy, int rows,
                         const PoolShape& shape, void* dx, cudaStream_t stream) {
  if (which != nullptr) {
    return Dispatch(element, [&](auto type) {
      using T = decltype(type);
      const size_t count = VectorsOf<T>(rows, shape.in);
      MaxPoolBackwardKernel<T><<<Blocks(count, kThreads), kThreads, 0, stream>>>(
          static_cast<const T*>(y), reinterpret_cast<const Bytes<T>*>(which), static_cast<const T*>(dy), count, shape,
          static_cast<T*>(dx));
    });
  }
  // Pixels that fill no window.
  if (shape.in.height % shape.height != 0 || shape.in.width % shape.width != 0) {
    const size_t count = Pixels(rows, shape.in) * static_cast<size_t>(shape.in.channels);
    if (const cudaError_t error = cudaMemsetAsync(dx, 0, count * SizeOf(element), stream); error != cudaSuccess) {
      return error;
    }
  }
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const size_t count = VectorsOf<T>(rows, shape.out);
    PoolBackwardKernel<T><<<Blocks(count, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(y), static_cast<const T*>(dy), count, shape,
        static_cast<T*>(dx));
  });
}

cudaError_t Add(Element element, const void* x, size_t count, void* y, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    NN_CHECK(count % kVector<T> == 0);
    const size_t vectors = count / kVector<T>;
    AddKernel<T>
        <<<Blocks(vectors, kThreads), kThreads, 0, stream>>>(static_cast<const T*>(x), vectors, static_cast<T*>(y));
  });
}

cudaError_t Count(uint64_t* counter, cudaStream_t stream) {
  CountKernel<<<1, 1, 0, stream>>>(counter);
  return cudaGetLastError();
}

cudaError_t Dropout(Element element, const void* x, size_t count, double p, uint64_t seed, const uint64_t* pass,
                    void* y, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    DropoutKernel<T><<<Blocks(count, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(x), count, DropoutChoice(p, seed, 0), seed, pass, static_cast<T*>(y));
  });
}

}  // namespace nn::cuda
