// SPDX-License-Identifier: Apache-2.0
// Convolutions from 16 channels to 16, and the gradients of their inputs, which are convolutions too. cuDNN's plans
// take two to three times as long: this reads memory once, converts nothing, and keeps the weight in registers.
#include <algorithm>

#include "examples/nn/check.h"
#include "examples/nn/cuda_narrow.cuh"

namespace nn::cuda {
namespace {

constexpr int kChannels = 16;
// The numbers that a pixel takes in shared memory; its neighbours are in other banks.
template <class T>
constexpr int kPixel = kChannels + kVector<T>;
// A row of the weight, behind which the next one begins in another bank.
constexpr int kWeightRow = kChannels * kNarrowTaps + 1;
constexpr int kAcross = kChannels / 8;  // products side by side
// One after the other, in all and for a tap.
template <class T>
constexpr int kSteps = kNarrowTaps* kChannels / kDepth<T>;
template <class T>
constexpr int kTapSteps = kChannels / kDepth<T>;

__device__ void StoreTwo(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = {a, b}; }
__device__ void StoreTwo(__half* to, float a, float b) { *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b); }
__device__ void StoreTwo(__nv_bfloat16* to, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}

// A word of the weight as products take it: of float32 number `first`, or of 16 bits that and the next one, which is
// `apart` behind it.
template <class T>
__device__ uint32_t WeightWord(const float* first, int apart) {
  if constexpr (std::is_same_v<T, float>) {
    return ForProduct<T>(__float_as_uint(*first));
  } else {
    const T two[] = {FromFloat<T>(first[0]), FromFloat<T>(first[apart])};
    return *reinterpret_cast<const uint32_t*>(two);
  }
}

// The weight in the registers of a warp.
template <class T>
using Weight = uint32_t[kSteps<T>][kAcross][2];

// `shared`: kChannels rows of the weight, which is [outputs, channels, taps], or with `flipped` [channels, outputs,
// taps], the last tap first.
template <class T>
__device__ void Take(const float* shared, bool flipped, Weight<T>& b) {
  const int lane = threadIdx.x % kWarp;
  const int apart = flipped ? kWeightRow : kNarrowTaps, outputs_apart = flipped ? kNarrowTaps : kWeightRow;
#pragma unroll
  for (int step = 0; step < kSteps<T>; ++step) {
    const int tap = step / kTapSteps<T>, channel = step % kTapSteps<T> * kDepth<T> + lane % 4 * (kDepth<T> / 8);
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
      const float* const from =
          shared + channel * apart + (n * 8 + lane / 4) * outputs_apart + (flipped ? kNarrowTaps - 1 - tap : tap);
      b[step][n][0] = WeightWord<T>(from, apart);
      b[step][n][1] = WeightWord<T>(from + kDepth<T> / 2 * apart, apart);
    }
  }
}

// The outputs of two segments of the tile at `x`; `top` is the tile's first line in the images `added`, which may be
// null, and `y`.
template <class T>
__device__ void Convolve(const T* x, const Weight<T>& b, const float* bias, bool relu, const Tiles& t, int two_segments,
                         int top, const T* added, T* y) {
  const int lane = threadIdx.x % kWarp, two = lane % 4 * 2;
  const Place from = t.PlaceOf(two_segments + lane / 8 % 2);
  const T* const pixel =
      x + (from.line * t.wide.divisor + from.column + lane % 8) * t.c.stride * kPixel<T> + lane / 16 * kVector<T>;
  float sum[kAcross][4];
#pragma unroll
  for (int n = 0; n < kAcross; ++n) {
    for (int i = 0; i < 4; ++i) sum[n][i] = bias == nullptr ? 0 : bias[n * 8 + two + i % 2];
  }
#pragma unroll
  for (int step = 0; step < kSteps<T>; ++step) {
    const int tap = step / kTapSteps<T>;
    uint32_t a[4];
    LoadMatrices(a, pixel + (tap / kNarrowSide * t.wide.divisor + tap % kNarrowSide) * kPixel<T> +
                        step % kTapSteps<T> * kDepth<T>);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ForProduct<T>(a[i]);
#pragma unroll
    for (int n = 0; n < kAcross; ++n) AddProduct<T>(sum[n], a, b[step][n]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Place to = t.PlaceOf(two_segments + half);
    if (top + to.line >= t.c.out.height) break;
    const size_t at = static_cast<size_t>(top + to.line) * t.c.out.width + to.column + lane / 4;
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
      const size_t pair = at * kChannels + n * 8 + two;
      float first = sum[n][2 * half], second = sum[n][2 * half + 1];
      if (added != nullptr) {
        first += ToFloat(added[pair]);
        second += ToFloat(added[pair + 1]);
      }
      StoreTwo(y + pair, relu ? Rectified(first) : first, relu ? Rectified(second) : second);
    }
  }
}

// y = added, which may be null, and the convolution of x, with `weight` as in Take.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    NarrowForwardKernel(const T* x, const float* weight, bool flipped, const float* bias, bool relu, Tiles t,
                        const T* added, T* y) {
  extern __shared__ uint4 shared[];
  __shared__ float rows[kChannels * kWeightRow];
  Weight<T> b;
  const auto copy = [&](int tile, T* to) {
    CopyTile<kChannels>(to, kPixel<T>, x + t.ImageOf(tile) * t.c.in.width * t.c.in.height * kChannels, t.c.in,
                        t.x_lines(), t.wide, t.TopOf(tile) * t.c.stride - t.c.padding, -t.c.padding);
  };
  const auto take_weight = [&] {
    for (int i = threadIdx.x; i < kChannels * kChannels * kNarrowTaps; i += kTileThreads) {
      rows[i + i / (kChannels * kNarrowTaps)] = weight[i];
    }
    __syncthreads();
    Take<T>(rows, flipped, b);
  };
  const auto use = [&](int tile, const T* from) {
    const size_t image = t.ImageOf(tile) * t.c.out.width * t.c.out.height * kChannels;
    for (int m = threadIdx.x / kWarp * 2; m * kSegment < t.pixels(); m += kTileWarps * 2) {
      Convolve(from, b, bias, relu, t, m, t.TopOf(tile), added == nullptr ? nullptr : added + image, y + image);
    }
  };
  ForTiles(t, reinterpret_cast<T*>(shared), t.x_pixels() * kPixel<T>, copy, take_weight, use);
}

Tiles TilesOf(Element element, const NarrowConvolution& c, int rows) {
  return TilesOf(c, rows, SizeOf(element) * kChannels + 16, 0, sizeof(float) * kChannels * kWeightRow);
}

bool IsNarrow(const NarrowConvolution& c) {
  return c.in.channels == kChannels && c.out.channels == kChannels && c.out.width % kSegment == 0;
}

// The convolution whose output is the gradient of the input.
NarrowConvolution Backwards(const NarrowConvolution& c) {
  NarrowConvolution back;
  back.in = c.out;
  back.out = c.in;
  back.stride = 1;
  back.padding = kNarrowSide - 1 - c.padding;
  return back;
}

cudaError_t Convolve(Element element, const NarrowConvolution& c, const void* x, const float* weight, bool flipped,
                     const float* bias, bool relu, const void* added, int rows, void* y, cudaStream_t stream) {
  const Tiles t = TilesOf(element, c, rows);
  NN_CHECK(IsNarrow(c) && t.lines > 0);
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    constexpr auto kernel = NarrowForwardKernel<T>;
    const size_t bytes = sizeof(T) * kPixel<T> * static_cast<size_t>(kStages * t.x_pixels());
    if (AllowShared(reinterpret_cast<const void*>(kernel), bytes) != cudaSuccess) return;
    kernel<<<static_cast<unsigned>(std::min(t.count, Processors())), kTileThreads, bytes, stream>>>(
        static_cast<const T*>(x), weight, flipped, bias, relu, t, static_cast<const T*>(added), static_cast<T*>(y));
  });
}

}  // namespace

bool HasNarrowForward(Element element, const NarrowConvolution& c) {
  return IsNarrow(c) && TilesOf(element, c, 1).lines > 0;
}

cudaError_t NarrowForward(Element element, const NarrowConvolution& c, const void* x, const float* weight,
                          const float* bias, bool relu, int rows, void* y, cudaStream_t stream) {
  return Convolve(element, c, x, weight, false, bias, relu, nullptr, rows, y, stream);
}

bool HasNarrowInputGrad(Element element, const NarrowConvolution& c) {
  return c.stride == 1 && c.padding < kNarrowSide && HasNarrowForward(element, Backwards(c));
}

cudaError_t NarrowInputGrad(Element element, const NarrowConvolution& c, const void* dy, const float* weight,
                            const void* added, int rows, void* dx, cudaStream_t stream) {
  NN_CHECK(c.stride == 1 && c.padding < kNarrowSide);
  return Convolve(element, Backwards(c), dy, weight, true, nullptr, false, added, rows, dx, stream);
}

}  // namespace nn::cuda
