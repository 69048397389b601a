// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "examples/nn/cuda_narrow.cuh"

namespace nn::cuda {
namespace {

// An attribute of the current GPU; 0 if there is none.
int Attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

}  // namespace

int Processors() { return Attribute(cudaDevAttrMultiProcessorCount); }

Tiles TilesOf(const NarrowConvolution& c, int rows, size_t x_bytes, size_t y_bytes, size_t other) {
  const int columns = (c.out.width - 1) * c.stride + kNarrowSide;
  Tiles t = {c, 0, 0, 0, Divisor(columns), Divisor(c.out.width), Divisor(std::max(1, c.out.width / kSegment))};
  if (Attribute(cudaDevAttrComputeCapabilityMajor) < 8) return t;
  const size_t most =
      std::min(kTileBytes, (static_cast<size_t>(Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) - other) / kStages);
  const auto fits = [&](int lines) {
    const size_t x = static_cast<size_t>(((lines - 1) * c.stride + kNarrowSide) * columns);
    return x * x_bytes + static_cast<size_t>(lines * c.out.width) * y_bytes <= most;
  };
  const int height = (c.out.height + 1) / 2 * 2;
  int lines = height;
  while (lines > 0 && !fits(lines)) lines -= 2;
  if (lines == 0) return t;
  t.bands = (height + lines - 1) / lines;
  t.lines = ((height + t.bands - 1) / t.bands + 1) / 2 * 2;
  t.count = rows * t.bands;
  return t;
}

cudaError_t AllowShared(const void* kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

}  // namespace nn::cuda
