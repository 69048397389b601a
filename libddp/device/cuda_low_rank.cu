// SPDX-License-Identifier: Apache-2.0
// Low-rank compression. The products are of a large matrix with a few vectors: to read the matrix takes the time, so
// each kernel reads it once for every kTile vectors. One launch works on many matrices, blockIdx.y on each.
//
// All sums are formed in an order that depends on the shapes alone, so that ranks get equal bits of equal messages.
#include <cfloat>
#include <cmath>

#include "libddp/device/cuda_convert.h"
#include "libddp/device/cuda_kernels.h"

namespace ddp::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kWideThreads = 512;  // where one block has a matrix's P or Q to itself
constexpr int kRows = 4;           // of a matrix that a block works on at once
constexpr int kTile = 4;           // vectors that a thread works on at once
constexpr int kPanel = 8;          // vectors to which one is made orthogonal at once
constexpr unsigned kMostBlocks = 2048;
constexpr size_t kMatricesPerLaunch = 32;

struct Table {
  LowRankMatrix matrices[kMatricesPerLaunch];
};

// What all threads of the block have, put together.
template <typename Join>
__device__ float JoinBlock(float mine, const Join& join) {
  __shared__ float parts[kWarp];
  for (int apart = kWarp / 2; apart > 0; apart /= 2) mine = join(mine, __shfl_xor_sync(~0u, mine, apart));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = mine;
  __syncthreads();
  float all = parts[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / kWarp; ++w) all = join(all, parts[w]);
  return all;
}
__device__ float SumBlock(float mine) {
  return JoinBlock(mine, [](float a, float b) { return a + b; });
}

__device__ float Length(const float* row, size_t n) {
  float sum = 0;
  for (size_t j = threadIdx.x; j < n; j += blockDim.x) sum = fmaf(row[j], row[j], sum);
  return sqrtf(SumBlock(sum));
}

// As on the CPU (cpu_low_rank.cc).
__device__ void Normalize(float* row, size_t n) {
  float largest = 0;
  bool finite = true;
  for (size_t j = threadIdx.x; j < n; j += blockDim.x) {
    const float size = fabsf(row[j]);
    finite = finite && size <= FLT_MAX;
    largest = fmaxf(largest, size);
  }
  largest = JoinBlock(largest, [](float a, float b) { return fmaxf(a, b); });
  finite = __syncthreads_and(finite) != 0;
  if (finite && largest == 0) return;
  const int exponent = finite ? ilogbf(largest) : 0;
  for (size_t j = threadIdx.x; j < n; j += blockDim.x) row[j] = finite ? scalbnf(row[j], -exponent) : NAN;
  __syncthreads();
}

// As on the CPU, but a row is made orthogonal to several rows at once. Twice is enough for that, too (Giraud, Langou
// and Rozloznik, 2005).
__device__ void Orthonormalize(float* rows, size_t rank, size_t n) {
  for (size_t i = 0; i < rank; ++i) {
    float* const row = rows + i * n;
    Normalize(row, n);
    const float before = Length(row, n);
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t first = 0; first < i; first += kPanel) {
        const int panel = static_cast<int>(i - first < kPanel ? i - first : kPanel);
        float dots[kPanel] = {};
        for (size_t j = threadIdx.x; j < n; j += blockDim.x) {
#pragma unroll
          for (int k = 0; k < kPanel; ++k) {
            if (k < panel) dots[k] = fmaf(row[j], rows[(first + k) * n + j], dots[k]);
          }
        }
#pragma unroll
        for (int k = 0; k < kPanel; ++k) {
          if (k < panel) dots[k] = SumBlock(dots[k]);
        }
        for (size_t j = threadIdx.x; j < n; j += blockDim.x) {
          float x = row[j];
#pragma unroll
          for (int k = 0; k < kPanel; ++k) {
            if (k < panel) x = fmaf(-dots[k], rows[(first + k) * n + j], x);
          }
          row[j] = x;
        }
        __syncthreads();
      }
    }
    const float after = Length(row, n);
    const float scale = after <= kDependent * before ? 0 : 1 / after;
    for (size_t j = threadIdx.x; j < n; j += blockDim.x) row[j] *= scale;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kWideThreads)
    PrepareQKernel(const __grid_constant__ Table table, const LowRankStep step) {
  const LowRankMatrix& a = table.matrices[blockIdx.y];
  const uint32_t now = *step.kept % 2;
  float* const q = a.q[1 - now];
  for (size_t k = threadIdx.x; k < a.rank * a.columns; k += blockDim.x) q[k] = step.warm_start ? a.q[now][k] : 0;
  __syncthreads();
  Orthonormalize(q, a.rank, a.columns);
  bool filled = false;
  for (size_t k = 0; k < a.rank; ++k) {
    bool any = false;
    for (size_t j = threadIdx.x; j < a.columns; j += blockDim.x) any = any || q[k * a.columns + j] != 0;
    if (__syncthreads_or(any)) continue;
    for (size_t j = threadIdx.x; j < a.columns; j += blockDim.x) {
      q[k * a.columns + j] = LowRankStart(a.random, *step.kept, k * a.columns + j);
    }
    filled = true;
  }
  __syncthreads();
  if (filled) Orthonormalize(q, a.rank, a.columns);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) MakePKernel(const __grid_constant__ Table table, const LowRankStep step) {
  const LowRankMatrix& a = table.matrices[blockIdx.y];
  const uint32_t now = *step.kept % 2;
  const T* const gradient = static_cast<const T*>(a.gradient);
  const float* const error = step.error_feedback ? a.errors[now] : nullptr;
  float* const m = a.errors[1 - now];
  const float* const q = a.q[1 - now];
  __shared__ float parts[kWarps][kRows * kTile];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (size_t row0 = size_t{blockIdx.x} * kRows; row0 < a.rows; row0 += size_t{gridDim.x} * kRows) {
    for (size_t k0 = 0; k0 < a.rank; k0 += kTile) {
      float sums[kRows][kTile] = {};
      for (size_t j = threadIdx.x; j < a.columns; j += kThreads) {
        float basis[kTile];
#pragma unroll
        for (int k = 0; k < kTile; ++k) basis[k] = k0 + k < a.rank ? q[(k0 + k) * a.columns + j] : 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (row0 + r >= a.rows) break;
          const size_t at = (row0 + r) * a.columns + j;
          float x;
          if (k0 == 0) {
            x = Widen(gradient[at]) + (error == nullptr ? 0 : error[at]);
            m[at] = x;
          } else {
            x = m[at];
          }
#pragma unroll
          for (int k = 0; k < kTile; ++k) sums[r][k] = fmaf(x, basis[k], sums[r][k]);
        }
      }
#pragma unroll
      for (int s = 0; s < kRows * kTile; ++s) {
        float sum = sums[s / kTile][s % kTile];
        for (int apart = kWarp / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        if (lane == 0) parts[warp][s] = sum;
      }
      __syncthreads();
      const size_t row = row0 + threadIdx.x / kTile, k = k0 + threadIdx.x % kTile;
      if (threadIdx.x < kRows * kTile && row < a.rows && k < a.rank) {
        float sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += parts[w][threadIdx.x];
        static_cast<T*>(a.p_message)[k * a.rows + row] = Narrow<T>(sum);
      }
      __syncthreads();
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kWideThreads) TakePKernel(const __grid_constant__ Table table) {
  const LowRankMatrix& a = table.matrices[blockIdx.y];
  const T* const message = static_cast<const T*>(a.p_message);
  for (size_t k = threadIdx.x; k < a.rank * a.rows; k += blockDim.x) a.p[k] = Widen(message[k]);
  __syncthreads();
  Orthonormalize(a.p, a.rank, a.rows);
}

// A warp has a row of so many columns, the block's warps have rows in turn.
__global__ void __launch_bounds__(kThreads) MakeQKernel(const __grid_constant__ Table table, const LowRankStep step) {
  const LowRankMatrix& a = table.matrices[blockIdx.y];
  const float* const m = a.errors[1 - (*step.kept % 2)];
  __shared__ float parts[kWarps][kTile][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const size_t tiles = (a.columns + kWarp - 1) / kWarp, chunk_rows = LowRankChunkRows(a.rows);
  for (size_t work = blockIdx.x; work < tiles * LowRankChunks(a.rows); work += gridDim.x) {
    const size_t chunk = work / tiles, j = work % tiles * kWarp + lane;
    const size_t begin = chunk * chunk_rows, end = begin + chunk_rows < a.rows ? begin + chunk_rows : a.rows;
    for (size_t k0 = 0; k0 < a.rank; k0 += kTile) {
      float sums[kTile] = {};
#pragma unroll 4
      for (size_t i = begin + warp; i < end; i += kWarps) {
        const float x = j < a.columns ? m[i * a.columns + j] : 0;
#pragma unroll
        for (int k = 0; k < kTile; ++k) {
          if (k0 + k < a.rank) sums[k] = fmaf(x, a.p[(k0 + k) * a.rows + i], sums[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < kTile; ++k) parts[warp][k][lane] = sums[k];
      __syncthreads();
      if (warp < kTile && k0 + warp < a.rank && j < a.columns) {
        float sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += parts[w][warp][lane];
        a.partials[(chunk * a.rank + k0 + warp) * a.columns + j] = sum;
      }
      __syncthreads();
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) FoldQKernel(const __grid_constant__ Table table) {
  const LowRankMatrix& a = table.matrices[blockIdx.y];
  const size_t count = a.rank * a.columns, chunks = LowRankChunks(a.rows);
  for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += size_t{gridDim.x} * kThreads) {
    float sum = 0;
    for (size_t c = 0; c < chunks; ++c) sum += a.partials[c * count + i];
    static_cast<T*>(a.q_message)[i] = Narrow<T>(sum);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DecompressKernel(const __grid_constant__ Table table, const LowRankStep step) {
  const LowRankMatrix& a = table.matrices[blockIdx.y];
  const uint32_t now = *step.kept % 2;
  const T* const message = static_cast<const T*>(a.q_message);
  T* const gradient = static_cast<T*>(a.gradient);
  float* const error = step.error_feedback ? a.errors[1 - now] : nullptr;
  for (size_t row0 = size_t{blockIdx.x} * kRows; row0 < a.rows; row0 += size_t{gridDim.x} * kRows) {
    for (size_t j = threadIdx.x; j < a.columns; j += kThreads) {
      float sums[kRows] = {};
      for (size_t k = 0; k < a.rank; ++k) {
        const float q = Widen(message[k * a.columns + j]);
        if (row0 == 0) a.q[1 - now][k * a.columns + j] = q;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (row0 + r < a.rows) sums[r] = fmaf(a.p[k * a.rows + row0 + r], q, sums[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row0 + r >= a.rows) break;
        const size_t at = (row0 + r) * a.columns + j;
        gradient[at] = Narrow<T>(sums[r]);
        if (error != nullptr) error[at] = fmaf(-step.share, sums[r], error[at]);
      }
    }
  }
}

__global__ void KeepKernel(const LowRankStep step) {
  if (*step.nonfinite == 0) ++*step.kept;
}

// Blocks for the matrix that has the most for them to do.
template <typename Work>
dim3 Grid(const Table& table, unsigned count, const Work& work) {
  size_t most = 1;
  for (unsigned k = 0; k < count; ++k) most = work(table.matrices[k]) > most ? work(table.matrices[k]) : most;
  return {most < kMostBlocks ? static_cast<unsigned>(most) : kMostBlocks, count, 1};
}

template <typename T>
void LaunchPass(LowRankPass pass, const LowRankStep& step, const Table& table, unsigned count, cudaStream_t stream) {
  const dim3 one_each(1, count, 1);
  const dim3 by_rows = Grid(table, count, [](const LowRankMatrix& a) { return (a.rows + kRows - 1) / kRows; });
  switch (pass) {
    case LowRankPass::kMakeP:
      PrepareQKernel<<<one_each, kWideThreads, 0, stream>>>(table, step);
      MakePKernel<T><<<by_rows, kThreads, 0, stream>>>(table, step);
      break;
    case LowRankPass::kMakeQ: {
      const dim3 by_columns = Grid(
          table, count, [](const LowRankMatrix& a) { return (a.columns + kWarp - 1) / kWarp * LowRankChunks(a.rows); });
      const dim3 by_sums =
          Grid(table, count, [](const LowRankMatrix& a) { return (a.rank * a.columns + kThreads - 1) / kThreads; });
      TakePKernel<T><<<one_each, kWideThreads, 0, stream>>>(table);
      MakeQKernel<<<by_columns, kThreads, 0, stream>>>(table, step);
      FoldQKernel<T><<<by_sums, kThreads, 0, stream>>>(table);
      break;
    }
    case LowRankPass::kDecompress:
      DecompressKernel<T><<<by_rows, kThreads, 0, stream>>>(table, step);
      break;
    case LowRankPass::kKeep:
      break;
  }
}

}  // namespace

cudaError_t LaunchLowRank(LowRankPass pass, Type type, const LowRankStep& step, const LowRankMatrix* matrices,
                          size_t count, cudaStream_t stream) {
  if (pass == LowRankPass::kKeep) KeepKernel<<<1, 1, 0, stream>>>(step);
  for (size_t at = 0; at < count; at += kMatricesPerLaunch) {
    Table table;
    const size_t some = count - at < kMatricesPerLaunch ? count - at : kMatricesPerLaunch;
    for (size_t k = 0; k < some; ++k) table.matrices[k] = matrices[at + k];
    const unsigned n = static_cast<unsigned>(some);
    if (type == Type::kFloat32) {
      LaunchPass<float>(pass, step, table, n, stream);
    } else if (type == Type::kFloat16) {
      LaunchPass<__half>(pass, step, table, n, stream);
    } else if (type == Type::kBFloat16) {
      LaunchPass<__nv_bfloat16>(pass, step, table, n, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  }
  return cudaGetLastError();
}

}  // namespace ddp::cuda
