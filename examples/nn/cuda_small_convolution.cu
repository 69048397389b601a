// SPDX-License-Identifier: Apache-2.0
// Convolutions of images with very few channels. What a GPU does for one is little, so each is a kernel that reads
// memory once; cuDNN's plans take several times as long.
#include "examples/nn/check.h"
#include "examples/nn/cuda_image_kernels.h"
#include "examples/nn/cuda_together.cuh"

namespace nn::cuda {
namespace {

// kChannels of a pixel's kVector are not 0.
template <int kKernel, int kChannels>
constexpr int kTaps = kKernel* kKernel* kChannels;

// The vector of pixel (line, column) of an image; 0 beyond its edges.
template <class T>
__device__ Vector<T> PixelOf(const T* image, const ImageShape& shape, int line, int column) {
  const bool inside = line >= 0 && line < shape.height && column >= 0 && column < shape.width;
  return inside ? Load(image, static_cast<size_t>(line) * shape.width + column) : Vector<T>();
}

// A thread computes a vector of the outputs of a pixel. `weight`: [outputs, channels, kKernel, kKernel].
template <class T, int kKernel, int kChannels>
__global__ void __launch_bounds__(kThreads) SmallForwardKernel(const T* x, const float* weight, const float* bias,
                                                               bool relu, size_t pixels, SmallConvolution s, T* y) {
  constexpr int V = kVector<T>, kAll = kTaps<kKernel, kChannels>;
  extern __shared__ float shared[];  // [taps][outputs]: the channel is the last part of a tap
  const int outputs = s.out.channels;
  for (int k = threadIdx.x; k < kAll * outputs; k += kThreads) {
    const int output = k % outputs, tap = k / outputs;
    const int area = tap / kChannels, channel = tap % kChannels;
    shared[k] = ToFloat(FromFloat<T>(weight[(output * kChannels + channel) * kKernel * kKernel + area]));
  }
  __syncthreads();
  const int vectors = outputs / V;
  const size_t i = ThreadIndex(), pixel = i / vectors;
  if (pixel >= pixels) return;
  const int first = static_cast<int>(i % vectors) * V;
  const size_t row = pixel / s.out.width, image = row / s.out.height;
  const int left = static_cast<int>(pixel - row * s.out.width) - s.padding;
  const int top = static_cast<int>(row - image * s.out.height) - s.padding;
  const T* const from = x + image * s.in.height * s.in.width * V;
  float sum[V];
  for (int k = 0; k < V; ++k) sum[k] = bias == nullptr ? 0 : bias[first + k];
#pragma unroll
  for (int area = 0; area < kKernel * kKernel; ++area) {
    const Vector<T> in = PixelOf(from, s.in, top + area / kKernel, left + area % kKernel);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const float* const w = shared + (area * kChannels + c) * outputs + first;
#pragma unroll
      for (int k = 0; k < V; ++k) sum[k] = fmaf(in[c], w[k], sum[k]);
    }
  }
  Vector<T> out;
  for (int k = 0; k < V; ++k) out.Set(k, relu ? Rectified(sum[k]) : sum[k]);
  Store(y, i, out);
}

// A thread adds up, for one output, its row's products with every tap. Then all blocks add up theirs.
template <class T, int kKernel, int kChannels>
__global__ void __launch_bounds__(kGridThreads)
    SmallWeightGradKernel(const T* x, const T* dy, size_t rows, SmallConvolution s, bool accumulate, float* grad,
                          float* scratch) {
  constexpr int V = kVector<T>, kAll = kTaps<kKernel, kChannels>, kWarps = kGridThreads / kWarp;
  __shared__ float parts[kWarps / 2][kAll * kWarp];  // [taps][outputs] of two warps
  const int outputs = s.out.channels;                // 16 or 32
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, output = lane % outputs;
  const size_t together = kWarp / outputs;  // rows of a warp
  float sum[kAll] = {};
  for (size_t row = (static_cast<size_t>(blockIdx.x) * kWarps + warp) * together + lane / outputs; row < rows;
       row += static_cast<size_t>(gridDim.x) * kWarps * together) {
    const size_t image = row / s.out.height;
    const int top = static_cast<int>(row - image * s.out.height) - s.padding;
    const T* const from = x + image * s.in.height * s.in.width * V;
    const T* const gradient = dy + row * s.out.width * outputs + output;
    float window[kKernel][kKernel][kChannels] = {};  // the first index is the column's
    const auto load = [&](float(&column)[kKernel][kChannels], int at) {
#pragma unroll
      for (int h = 0; h < kKernel; ++h) {
        const Vector<T> in = PixelOf(from, s.in, top + h, at);
        for (int c = 0; c < kChannels; ++c) column[h][c] = in[c];
      }
    };
#pragma unroll
    for (int w = 0; w + 1 < kKernel; ++w) load(window[w + 1], w - s.padding);
#pragma unroll 4
    for (int column = 0; column < s.out.width; ++column) {
#pragma unroll
      for (int w = 0; w + 1 < kKernel; ++w) {
        for (int h = 0; h < kKernel; ++h) {
          for (int c = 0; c < kChannels; ++c) window[w][h][c] = window[w + 1][h][c];
        }
      }
      load(window[kKernel - 1], column + kKernel - 1 - s.padding);
      const float d = ToFloat(gradient[static_cast<size_t>(column) * outputs]);
#pragma unroll
      for (int tap = 0; tap < kAll; ++tap) {
        const int area = tap / kChannels;
        sum[tap] = fmaf(d, window[area % kKernel][area / kKernel][tap % kChannels], sum[tap]);
      }
    }
  }
  const int results = kAll * outputs;
#pragma unroll
  for (int tap = 0; tap < kAll; ++tap) {
    for (int apart = outputs; apart < kWarp; apart *= 2) sum[tap] += __shfl_xor_sync(~0u, sum[tap], apart);
  }
  for (const int half : {0, 1}) {
    float* const own = parts[warp % (kWarps / 2)];
    if (warp / (kWarps / 2) == half && lane < outputs) {
#pragma unroll
      for (int tap = 0; tap < kAll; ++tap) {
        float* const to = own + tap * outputs + output;
        *to = sum[tap] + (half == 0 ? 0 : *to);
      }
    }
    __syncthreads();
  }
  for (int k = threadIdx.x; k < results; k += kGridThreads) {
    float all = 0;
    for (int w = 0; w < kWarps / 2; ++w) all += parts[w][k];
    scratch[static_cast<size_t>(k) * gridDim.x + blockIdx.x] = all;
  }
  cooperative_groups::this_grid().sync();
  for (int k = blockIdx.x * kWarps + warp; k < results; k += gridDim.x * kWarps) {
    float all = 0;
    for (unsigned b = lane; b < gridDim.x; b += kWarp) all += __ldcg(scratch + static_cast<size_t>(k) * gridDim.x + b);
    for (int apart = kWarp / 2; apart > 0; apart /= 2) all += __shfl_xor_sync(~0u, all, apart);
    const int tap = k / outputs, area = tap / kChannels;
    float* const to = grad + ((k % outputs) * kChannels + tap % kChannels) * kKernel * kKernel + area;
    if (lane == 0) *to = all + (accumulate ? *to : 0);
  }
}

// fn(integral constants of kKernel and kChannels); false: there is no such kernel.
template <class Fn>
bool WithShape(int kernel, int channels, const Fn& fn) {
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 3> three;
  const std::integral_constant<int, 5> five;
  if (kernel == 3 && channels == 1) return fn(three, one), true;
  if (kernel == 3 && channels == 3) return fn(three, three), true;
  if (kernel == 5 && channels == 1) return fn(five, one), true;
  return false;
}

}  // namespace

bool IsSmallConvolution(const SmallConvolution& c) {
  return (c.out.channels == 16 || c.out.channels == 32) && WithShape(c.kernel, c.in.channels, [](auto, auto) {});
}

size_t SmallConvolutionFloats(const SmallConvolution& c) {
  return static_cast<size_t>(c.kernel * c.kernel * c.in.channels * c.out.channels) * kGridBlocks;
}

cudaError_t SmallConvolutionForward(Element element, const SmallConvolution& c, const void* x, const float* weight,
                                    const float* bias, bool relu, int rows, void* y, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const size_t pixels = static_cast<size_t>(rows) * static_cast<size_t>(c.out.height * c.out.width);
    const size_t threads = pixels * static_cast<size_t>(c.out.channels / kVector<T>);
    WithShape(c.kernel, c.in.channels, [&](auto kernel, auto channels) {
      const size_t weights = sizeof(float) * kTaps<kernel.value, channels.value> * c.out.channels;
      SmallForwardKernel<T, kernel.value, channels.value><<<Blocks(threads, kThreads), kThreads, weights, stream>>>(
          static_cast<const T*>(x), weight, bias, relu, pixels, c, static_cast<T*>(y));
    });
  });
}

cudaError_t SmallConvolutionWeightGrad(Element element, const SmallConvolution& c, const void* x, const void* dy,
                                       int rows, bool accumulate, float* grad, int processors, float* scratch,
                                       cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    WithShape(c.kernel, c.in.channels, [&](auto kernel, auto channels) {
      LaunchTogether(SmallWeightGradKernel<T, kernel.value, channels.value>, processors, stream,
                     static_cast<const T*>(x), static_cast<const T*>(dy),
                     static_cast<size_t>(rows) * static_cast<size_t>(c.out.height), c, accumulate, grad, scratch);
    });
  });
}

}  // namespace nn::cuda
