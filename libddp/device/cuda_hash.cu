// SPDX-License-Identifier: Apache-2.0
// Hashes of many arrays in one launch.
#include "libddp/device/cuda_kernels.h"
#include "libddp/device/hash_rule.h"

namespace ddp::cuda {
namespace {

// Word i of an array belongs to block i / kTile. Sums of whole numbers do not depend on the order of the blocks.
constexpr int kThreads = 256;
constexpr size_t kTile = size_t{kThreads} * 16;  // in words

struct Table {
  const void* in[kRangesPerLaunch];
  size_t bytes[kRangesPerLaunch];
  uint32_t end[kRangesPerLaunch];  // the first tile that is not this array's
  unsigned long long* results;     // by array
};

// Word i of an array whose address is a multiple of sizeof(Unit).
template <typename Unit>
__device__ uint64_t LoadWord(const void* in, size_t i) {
  constexpr int kUnits = sizeof(uint64_t) / sizeof(Unit);
  const Unit* const units = static_cast<const Unit*>(in) + i * kUnits;
  uint64_t word = 0;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) word |= uint64_t{units[k]} << (8 * sizeof(Unit) * k);
  return word;
}

template <typename Unit>
__device__ uint64_t SumWords(const void* in, size_t begin, size_t end) {
  uint64_t sum = 0;
#pragma unroll 8
  for (size_t i = begin + threadIdx.x; i < end; i += kThreads) sum += HashWord(LoadWord<Unit>(in, i), i + 1);
  return sum;
}

__device__ uint64_t LoadLastWord(const void* in, size_t bytes) {
  const uint8_t* const tail = static_cast<const uint8_t*>(in) + bytes / 8 * 8;
  uint64_t word = 0;
  for (size_t k = 0; k < bytes % 8; ++k) word |= uint64_t{tail[k]} << (8 * k);
  return word;
}

__global__ void __launch_bounds__(kThreads) HashKernel(const __grid_constant__ Table table) {
  int k = 0;
  while (blockIdx.x >= table.end[k]) ++k;
  const size_t begin = (blockIdx.x - (k == 0 ? 0 : table.end[k - 1])) * kTile;
  const void* const in = table.in[k];
  const size_t bytes = table.bytes[k], words = bytes / 8;
  const size_t end = begin + kTile < words ? begin + kTile : words;
  const uintptr_t address = reinterpret_cast<uintptr_t>(in);
  uint64_t sum = address % 8 == 0   ? SumWords<uint64_t>(in, begin, end)
                 : address % 4 == 0 ? SumWords<uint32_t>(in, begin, end)
                 : address % 2 == 0 ? SumWords<uint16_t>(in, begin, end)
                                    : SumWords<uint8_t>(in, begin, end);
  if (begin == 0 && threadIdx.x == 0) {
    sum += HashWord(bytes, 0);
    if (bytes % 8 != 0) sum += HashWord(LoadLastWord(in, bytes), words + 1);
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(0xffffffff, sum, distance);
  if (threadIdx.x % 32 == 0) atomicAdd(table.results + k, static_cast<unsigned long long>(sum));
}

}  // namespace

cudaError_t LaunchHash(const Piece* pieces, size_t count, uint64_t* results, cudaStream_t stream) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  if (const cudaError_t error = cudaMemsetAsync(results, 0, count * sizeof(uint64_t), stream); error != cudaSuccess) {
    return error;
  }
  for (size_t at = 0; at < count; at += kRangesPerLaunch) {
    Table table;
    table.results = reinterpret_cast<unsigned long long*>(results + at);
    size_t tiles = 0;
    for (size_t k = 0; k < kRangesPerLaunch && at + k < count; ++k) {
      const Piece& piece = pieces[at + k];
      tiles += piece.count < 8 ? 1 : (piece.count / 8 + kTile - 1) / kTile;
      table.in[k] = piece.in;
      table.bytes[k] = piece.count;
      table.end[k] = static_cast<uint32_t>(tiles);
    }
    if (tiles > INT32_MAX) return cudaErrorInvalidValue;  // more than any GPU's memory holds
    HashKernel<<<static_cast<uint32_t>(tiles), kThreads, 0, stream>>>(table);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ddp::cuda
