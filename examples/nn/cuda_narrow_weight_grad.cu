// SPDX-License-Identifier: Apache-2.0
// The gradients of narrow convolutions' weights. There are few of them, and each is a sum over all pixels: blocks add
// up parts of the pixels with all taps at once, and a second kernel adds up the blocks' sums, in order.
#include <algorithm>

#include "examples/nn/check.h"
#include "examples/nn/cuda_narrow.cuh"

namespace nn::cuda {
namespace {

// A block has so many channels of the input, and kOutputs. Its warps have eight channels each.
constexpr int kSlice = 16, kSliceParts = kSlice / 8, kPixelWarps = kTileWarps / kSliceParts;
constexpr int kMostOutputs = 32;
// Numbers between pixels in shared memory: a lane's neighbours are in other banks.
constexpr int kGap = 8;

template <int kOutputs>
constexpr int kSums = kOutputs* kSlice* kNarrowTaps;  // of a block

struct Slices {
  explicit Slices(const NarrowConvolution& c)
      : outputs(c.out.channels % kMostOutputs == 0 ? kMostOutputs : 16),
        along(c.in.channels / kSlice),
        count(along * (c.out.channels / outputs)),
        parts(std::max(1, Processors() / count)) {}
  int outputs;  // of a slice
  int along;    // the channels of the input
  int count;
  int parts;  // blocks for a slice
};

// Of the lanes of a warp: [outputs / 16][taps][4], the last two as one.
template <int kOutputs>
constexpr int kProducts = kOutputs / 16 * kNarrowTaps;
template <int kOutputs>
using Sum = float[kProducts<kOutputs>][4];

// The sums of one tile's pixels, in products whose depth is pixels.
template <class T, int kOutputs>
__device__ void AddTile(const T* x, const T* dy, const Tiles& t, int pixel_warp, int part, Sum<kOutputs>& sum) {
  constexpr int kX = kSlice + kGap, kY = kOutputs + kGap, kBlocks = kOutputs / 16;
  constexpr bool kWords = sizeof(T) == 4;
  const int lane = threadIdx.x % kWarp, wide = t.wide.divisor;
  for (int step = pixel_warp; step * kDepth<T> < t.pixels(); step += kPixelWarps) {
    uint32_t a[kBlocks][4];
    const T* from;  // of x
    if constexpr (kWords) {
      const Place at = t.PlaceOf(step);
      const int column = at.column + lane % 4, own = lane / 4;
      const T* const gradient = dy + (at.line * t.c.out.width + column) * kY + own;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        for (int i = 0; i < 4; ++i) {
          a[m][i] = ForProduct<T>(__float_as_uint(gradient[i / 2 * 4 * kY + m * 16 + i % 2 * 8]));
        }
      }
      from = x + (at.line * wide + column) * t.c.stride * kX + part * 8 + own;
    } else {
      const Place at = t.PlaceOf(step * 2 + lane / 16), x_at = t.PlaceOf(step * 2 + lane / 8 % 2);
      const T* const gradient = dy + (at.line * t.c.out.width + at.column + lane % 8) * kY + lane / 8 % 2 * 8;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) LoadTransposed(a[m], gradient + m * 16);
      from = x + (x_at.line * wide + x_at.column + lane % 8) * t.c.stride * kX + part * 8;
    }
#pragma unroll
    for (int tap = 0; tap < kNarrowTaps; ++tap) {
      const T* const at = from + (tap / kNarrowSide * wide + tap % kNarrowSide) * kX;
      uint32_t b[2];
      if constexpr (kWords) {
        b[0] = ForProduct<T>(__float_as_uint(at[0]));
        b[1] = ForProduct<T>(__float_as_uint(at[4 * t.c.stride * kX]));
      } else {
        LoadTransposed(b, at);
      }
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) AddProduct<T>(sum[m * kNarrowTaps + tap], a[m], b);
    }
  }
}

// Adds up the sums of the warps of the same channels; the first of them have the result.
template <int kCount>
__device__ void AddWarps(float (&sum)[kCount][4], int pixel_warp, int part, float* shared) {
  const int lane = threadIdx.x % kWarp;
  for (int half = kPixelWarps / 2; half > 0; half /= 2) {
    float* const at = shared + (pixel_warp % half * kSliceParts + part) * kCount * 4 * kWarp + lane;
    __syncthreads();
    if (pixel_warp >= half && pixel_warp < 2 * half) {
#pragma unroll
      for (int i = 0; i < kCount * 4; ++i) at[i * kWarp] = sum[i / 4][i % 4];
    }
    __syncthreads();
    if (pixel_warp < half) {
#pragma unroll
      for (int i = 0; i < kCount * 4; ++i) sum[i / 4][i % 4] += at[i * kWarp];
    }
  }
}

// Block (i, slice) adds up the tiles i, i + gridDim.x and so on. sums: [slices][blocks][kSums], which are
// [part][products][4][lanes].
template <class T, int kOutputs>
__global__ void __launch_bounds__(kTileThreads)
    NarrowWeightSumsKernel(const T* x, const T* dy, Tiles t, int slices_along, float* sums) {
  constexpr int kX = kSlice + kGap, kY = kOutputs + kGap, kCount = kProducts<kOutputs> * 4;
  extern __shared__ uint4 shared[];
  const int x_size = t.x_pixels() * kX;
  const int warp = threadIdx.x / kWarp, part = warp % kSliceParts, pixel_warp = warp / kSliceParts;
  const int slice = static_cast<int>(blockIdx.y);
  const T* const own_x = x + slice % slices_along * kSlice;
  const T* const own_dy = dy + slice / slices_along * kOutputs;
  const auto copy = [&](int tile, T* to) {
    const NarrowConvolution& c = t.c;
    const int top = t.TopOf(tile);
    CopyTile<kSlice>(to, kX, own_x + t.ImageOf(tile) * c.in.height * c.in.width * c.in.channels, c.in, t.x_lines(),
                     t.wide, top * c.stride - c.padding, -c.padding);
    CopyTile<kOutputs>(to + x_size, kY, own_dy + t.ImageOf(tile) * c.out.height * c.out.width * c.out.channels, c.out,
                       t.lines, t.columns, top, 0);
  };
  Sum<kOutputs> sum = {};
  const auto use = [&](int, const T* from) { AddTile<T, kOutputs>(from, from + x_size, t, pixel_warp, part, sum); };
  ForTiles(
      t, reinterpret_cast<T*>(shared), x_size + t.pixels() * kY, copy, [] {}, use);
  AddWarps(sum, pixel_warp, part, reinterpret_cast<float*>(shared));
  if (pixel_warp != 0) return;
  float* const to = sums + (static_cast<size_t>(slice) * gridDim.x + blockIdx.x) * kSums<kOutputs> +
                    part * kCount * kWarp + threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i * kWarp] = sum[i / 4][i % 4];
}

constexpr int kSumThreads = 256;

// A block adds up 32 numbers of all blocks of a slice.
template <int kOutputs>
__global__ void __launch_bounds__(kSumThreads)
    NarrowWeightGradKernel(const float* sums, int parts, int slices_along, int channels, bool accumulate, float* grad) {
  constexpr int kGroups = kSumThreads / kWarp, kCount = kProducts<kOutputs> * 4;
  __shared__ float shared[kGroups][kWarp];
  const int lane = threadIdx.x % kWarp, group = threadIdx.x / kWarp;
  const int line = static_cast<int>(blockIdx.x) % (kSums<kOutputs> / kWarp);
  const int slice = static_cast<int>(blockIdx.x) / (kSums<kOutputs> / kWarp);
  const float* const from = sums + static_cast<size_t>(slice) * parts * kSums<kOutputs> + line * kWarp + lane;
  float sum = 0;
#pragma unroll 4
  for (int p = group; p < parts; p += kGroups) sum += from[static_cast<size_t>(p) * kSums<kOutputs>];
  shared[group][lane] = sum;
  __syncthreads();
  if (group != 0) return;
  for (int g = 1; g < kGroups; ++g) sum += shared[g][lane];
  // What AddProduct says of the lanes' sums.
  const int part = line / kCount, i = line % kCount, m = i / (kNarrowTaps * 4), tap = i / 4 % kNarrowTaps;
  const int output = slice / slices_along * kOutputs + m * 16 + i % 4 / 2 * 8 + lane / 4;
  const int channel = slice % slices_along * kSlice + part * 8 + lane % 4 * 2 + i % 2;
  float* const to = grad + (static_cast<size_t>(output) * channels + channel) * kNarrowTaps + tap;
  *to = sum + (accumulate ? *to : 0);
}

template <class T, int kOutputs>
void WeightGrad(const NarrowConvolution& c, const Slices& slices, const void* x, const void* dy, int rows,
                bool accumulate, float* grad, float* scratch, cudaStream_t stream) {
  constexpr auto kernel = NarrowWeightSumsKernel<T, kOutputs>;
  constexpr size_t kXBytes = sizeof(T) * (kSlice + kGap), kYBytes = sizeof(T) * (kOutputs + kGap);
  const Tiles t = TilesOf(c, rows, kXBytes, kYBytes, 0);
  const size_t stage = kXBytes * static_cast<size_t>(t.x_pixels()) + kYBytes * static_cast<size_t>(t.pixels());
  const size_t bytes = std::max(kStages * stage, sizeof(float) * kSums<kOutputs> * kPixelWarps / 2);
  if (AllowShared(reinterpret_cast<const void*>(kernel), bytes) != cudaSuccess) return;
  const unsigned parts = static_cast<unsigned>(std::min(slices.parts, t.count));
  kernel<<<dim3(parts, static_cast<unsigned>(slices.count)), kTileThreads, bytes, stream>>>(
      static_cast<const T*>(x), static_cast<const T*>(dy), t, slices.along, scratch);
  NarrowWeightGradKernel<kOutputs>
      <<<static_cast<unsigned>(slices.count * kSums<kOutputs> / kWarp), kSumThreads, 0, stream>>>(
          scratch, static_cast<int>(parts), slices.along, c.in.channels, accumulate, grad);
}

}  // namespace

bool HasNarrowWeightGrad(Element element, const NarrowConvolution& c) {
  if (c.in.channels % kSlice != 0 || c.out.channels % 16 != 0 || c.out.width % kSegment != 0) return false;
  // What is larger keeps cuDNN's plans busy.
  const int products = c.in.channels * c.out.channels;
  if (products > 64 * 64 || (products > 32 * 64 && Pixels(1, c.out) > 256)) return false;
  const size_t bytes = SizeOf(element);
  return TilesOf(c, 1, bytes * (kSlice + kGap), bytes * static_cast<size_t>(Slices(c).outputs + kGap), 0).lines > 0;
}

size_t NarrowWeightGradFloats(const NarrowConvolution& c) {
  const Slices slices(c);
  return static_cast<size_t>(slices.count * slices.parts) * static_cast<size_t>(slices.outputs * kSlice * kNarrowTaps);
}

cudaError_t NarrowWeightGrad(Element element, const NarrowConvolution& c, const void* x, const void* dy, int rows,
                             bool accumulate, float* grad, float* scratch, cudaStream_t stream) {
  NN_CHECK(HasNarrowWeightGrad(element, c));
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const Slices slices(c);
    if (slices.outputs == kMostOutputs) {
      WeightGrad<T, kMostOutputs>(c, slices, x, dy, rows, accumulate, grad, scratch, stream);
    } else {
      WeightGrad<T, 16>(c, slices, x, dy, rows, accumulate, grad, scratch, stream);
    }
  });
}

}  // namespace nn::cuda
