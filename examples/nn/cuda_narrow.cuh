// SPDX-License-Identifier: Apache-2.0
// What the kernels of narrow convolutions share: tiles of images in shared memory.
//
// A tile is some lines of one image's outputs, with all columns, and what of the input they are computed from. Tiles
// come into shared memory one after the other, kStages at a time: one is used while the next ones are on their way. The
// pixels of a tile are taken in segments of eight, since a line has a multiple of that.
#ifndef EXAMPLES_NN_CUDA_NARROW_CUH_
#define EXAMPLES_NN_CUDA_NARROW_CUH_

#include "examples/nn/cuda_image_kernels.h"
#include "examples/nn/cuda_tensor_core.cuh"

namespace nn::cuda {

constexpr int kNarrowSide = 3, kNarrowTaps = kNarrowSide * kNarrowSide;  // of the kernel
constexpr int kSegment = 8;
constexpr int kStages = 3;
constexpr int kTileThreads = 512, kTileWarps = kTileThreads / kWarp;

// x / divisor for x * divisor < 2^32.
struct Divisor {
  explicit Divisor(int n)
      : divisor(n), factor(static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<uint32_t>(n)) + 1) {}
  __device__ int Of(int x) const {
    return divisor == 1 ? x : static_cast<int>(__umulhi(static_cast<uint32_t>(x), factor));
  }
  int divisor;
  uint32_t factor;
};

struct Place {
  int line, column;
};

struct Tiles {
  NarrowConvolution c;
  int lines;     // of outputs in a tile; even
  int bands;     // tiles of an image
  int count;     // of all images
  Divisor wide;  // columns of the input in a tile
  Divisor columns;
  Divisor segments;  // in a line

  __host__ __device__ int x_lines() const { return (lines - 1) * c.stride + kNarrowSide; }
  __host__ __device__ int x_pixels() const { return x_lines() * wide.divisor; }
  __host__ __device__ int pixels() const { return lines * c.out.width; }
  __device__ size_t ImageOf(int tile) const { return static_cast<size_t>(tile / bands); }
  __device__ int TopOf(int tile) const { return tile % bands * lines; }  // its first line of outputs
  // Of a segment's first output.
  __device__ Place PlaceOf(int segment) const {
    const int line = segments.Of(segment);
    return {line, (segment - line * segments.divisor) * kSegment};
  }
};

// Of the current GPU.
int Processors();

// Tiles of at most kTileBytes, with `x_bytes` and `y_bytes` for a pixel of the input and of the output. 0 lines if two
// do not fit beside `other` bytes of shared memory.
constexpr size_t kTileBytes = 56 << 10;
Tiles TilesOf(const NarrowConvolution& c, int rows, size_t x_bytes, size_t y_bytes, size_t other);

// Lets `kernel` use so much dynamic shared memory, where that is more than the 48 KiB that every kernel may use.
cudaError_t AllowShared(const void* kernel, size_t bytes);

// Copies lines and columns from (top, left) of an image, kChannels of `channels`, to a tile with `stride` numbers
// from pixel to pixel.
template <int kChannels, class T>
__device__ void CopyTile(T* to, int stride, const T* image, const ImageShape& shape, int lines, Divisor columns,
                         int top, int left) {
  constexpr int V = kVector<T>, kVectors = kChannels / V;
  for (int i = threadIdx.x; i < lines * columns.divisor * kVectors; i += kTileThreads) {
    const int pixel = i / kVectors, part = i % kVectors * V;
    const int line = columns.Of(pixel), h = top + line, w = left + pixel - line * columns.divisor;
    const bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
    const T* const from = image + (inside ? (static_cast<size_t>(h) * shape.width + w) * shape.channels + part : 0);
    CopyAside(to + pixel * stride + part, from, inside);
  }
}

// use(tile, memory) for the tiles of this block, one after the other, by all threads. copy(tile, memory) begins the
// copies of a tile to its `stage_size` numbers of memory. Calls before() while the first copies are on their way.
template <class T, class Copy, class Before, class Use>
__device__ void ForTiles(const Tiles& t, T* shared, int stage_size, const Copy& copy, const Before& before,
                         const Use& use) {
  const int step = static_cast<int>(gridDim.x);
  const auto begin = [&](int tile, int stage) {
    if (tile < t.count) copy(tile, shared + stage * stage_size);
    EndCopies();
  };
  int stage = 0, tile = static_cast<int>(blockIdx.x);
  for (int s = 0; s + 1 < kStages; ++s) begin(tile + s * step, s);
  before();
  for (; tile < t.count; tile += step) {
    WaitForCopies<kStages - 2>();
    __syncthreads();  // all have used the tile before
    begin(tile + (kStages - 1) * step, (stage + kStages - 1) % kStages);
    use(tile, shared + stage * stage_size);
    stage = (stage + 1) % kStages;
  }
  WaitForCopies<0>();
}

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_NARROW_CUH_
