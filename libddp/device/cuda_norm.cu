// SPDX-License-Identifier: Apache-2.0
// Norms of many ranges in two launches, in an order of additions that depends on the counts alone.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "libddp/device/cuda_kernels.h"

namespace ddp::cuda {
namespace {

// Element i of a range belongs to block i / kTile, and there to thread i % kThreads.
constexpr int kThreads = 256;
constexpr size_t kTile = size_t{kThreads} * 32;

struct Table {
  const void* in[kRangesPerLaunch];
  size_t count[kRangesPerLaunch];
  uint32_t end[kRangesPerLaunch];  // the first tile that is not this range's
  int ranges;
};

__device__ double Wide(double x) { return x; }
__device__ double Wide(float x) { return x; }
__device__ double Wide(__half x) { return __half2float(x); }
__device__ double Wide(__nv_bfloat16 x) { return __bfloat162float(x); }

// All threads' values, to thread 0.
template <NormKind kKind>
__device__ double JoinBlock(double mine) {
  __shared__ double all[kThreads];
  all[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) {
      all[threadIdx.x] = JoinParts(kKind, all[threadIdx.x], all[threadIdx.x + half]);
    }
  }
  return all[0];
}

template <typename T, NormKind kKind>
__global__ void __launch_bounds__(kThreads) NormKernel(const __grid_constant__ Table table, double* partials) {
  int range = 0;
  while (blockIdx.x >= table.end[range]) ++range;
  const size_t begin = (blockIdx.x - (range == 0 ? 0 : table.end[range - 1])) * kTile;
  const T* const in = static_cast<const T*>(table.in[range]);
  const size_t end = begin + kTile < table.count[range] ? begin + kTile : table.count[range];
  double sum = 0;
#pragma unroll 8
  for (size_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const double x = Wide(in[i]);
    sum = JoinParts(kKind, sum, kKind == NormKind::kL2 ? x * x : fabs(x));
  }
  sum = JoinBlock<kKind>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <NormKind kKind>
__global__ void __launch_bounds__(kThreads) FoldKernel(const double* partials, size_t count, double* result) {
  double sum = 0;
  for (size_t i = threadIdx.x; i < count; i += kThreads) sum = JoinParts(kKind, sum, partials[i]);
  sum = JoinBlock<kKind>(sum);
  if (threadIdx.x == 0) *result = sum;
}

size_t Tiles(const Piece& piece) { return (piece.count + kTile - 1) / kTile; }

template <typename T, NormKind kKind>
cudaError_t Launch(const Piece* pieces, size_t count, double* partials, double* result, cudaStream_t stream) {
  size_t done = 0;
  for (size_t at = 0; at < count;) {
    Table table;
    table.ranges = 0;
    size_t tiles = 0;
    for (; at < count && table.ranges < kRangesPerLaunch; ++at) {
      if (pieces[at].count == 0) continue;
      tiles += Tiles(pieces[at]);
      table.in[table.ranges] = pieces[at].in;
      table.count[table.ranges] = pieces[at].count;
      table.end[table.ranges++] = static_cast<uint32_t>(tiles);
    }
    if (tiles == 0) continue;
    if (tiles > INT32_MAX) return cudaErrorInvalidValue;  // more than any GPU's memory holds
    NormKernel<T, kKind><<<static_cast<uint32_t>(tiles), kThreads, 0, stream>>>(table, partials + done);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    done += tiles;
  }
  FoldKernel<kKind><<<1, kThreads, 0, stream>>>(partials, done, result);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchOf(NormKind kind, const Piece* pieces, size_t count, double* partials, double* result,
                     cudaStream_t stream) {
  switch (kind) {
    case NormKind::kL1:
      return Launch<T, NormKind::kL1>(pieces, count, partials, result, stream);
    case NormKind::kL2:
      return Launch<T, NormKind::kL2>(pieces, count, partials, result, stream);
    default:
      return Launch<T, NormKind::kMax>(pieces, count, partials, result, stream);
  }
}

__global__ void FinishClipKernel(NormKind kind, double max_norm, ClipNumbers* numbers) {
  FinishClip(kind, max_norm, *numbers);
}

__global__ void UpdateScaleKernel(ScaleRule rule, ScalerNumbers* numbers) { UpdateScale(rule, *numbers); }

}  // namespace

size_t NormPartials(const Piece* pieces, size_t count) {
  size_t tiles = 0;
  for (size_t i = 0; i < count; ++i) tiles += Tiles(pieces[i]);
  return tiles;
}

cudaError_t LaunchNorm(Type type, NormKind kind, const Piece* pieces, size_t count, double* partials, double* result,
                       cudaStream_t stream) {
  switch (type) {
    case Type::kFloat64:
      return LaunchOf<double>(kind, pieces, count, partials, result, stream);
    case Type::kFloat32:
      return LaunchOf<float>(kind, pieces, count, partials, result, stream);
    case Type::kFloat16:
      return LaunchOf<__half>(kind, pieces, count, partials, result, stream);
    case Type::kBFloat16:
      return LaunchOf<__nv_bfloat16>(kind, pieces, count, partials, result, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t LaunchFinishClip(NormKind kind, double max_norm, ClipNumbers* numbers, cudaStream_t stream) {
  FinishClipKernel<<<1, 1, 0, stream>>>(kind, max_norm, numbers);
  return cudaGetLastError();
}

cudaError_t LaunchUpdateScale(const ScaleRule& rule, ScalerNumbers* numbers, cudaStream_t stream) {
  UpdateScaleKernel<<<1, 1, 0, stream>>>(rule, numbers);
  return cudaGetLastError();
}

}  // namespace ddp::cuda
