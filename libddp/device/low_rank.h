// SPDX-License-Identifier: Apache-2.0
// The arithmetic of low-rank compression (PowerSGD), step by step, for matrices in the memory of one device. Plain data
// on plain memory, so that kernels can take it.
#ifndef LIBDDP_DEVICE_LOW_RANK_H_
#define LIBDDP_DEVICE_LOW_RANK_H_

#include <cstddef>
#include <cstdint>

#include "libddp/device/scale_rule.h"

namespace ddp {

// A gradient of rows x columns, and what is kept of it between the steps. P and Q are stored transposed, one basis
// vector after the other. Matrices are row-major, without gaps.
struct LowRankMatrix {
  size_t rows = 0, columns = 0, rank = 0;
  void* gradient = nullptr;   // [rows, columns], before this rank's, afterwards the result
  void* p_message = nullptr;  // [rank, rows], what the ranks add up
  void* q_message = nullptr;  // [rank, columns]
  // Of each pair, one is what the last step has left, and the other what this step makes; LowRankStep says which.
  float* errors[2] = {};      // [rows, columns]; the same memory without error feedback
  float* q[2] = {};           // [rank, columns]
  float* p = nullptr;         // [rank, rows]
  float* partials = nullptr;  // on GPUs: [LowRankChunks(rows), rank, columns]
  uint64_t random = 0;        // the seed of what Q begins with; equal on all ranks
};

struct LowRankStep {
  bool warm_start = true;
  bool error_feedback = true;
  float share = 1;                // of the result that is this rank's
  uint32_t* kept = nullptr;       // the steps that have been kept; if it is odd, they have left the second of each pair
  uint32_t* nonfinite = nullptr;  // for kKeep
};

enum class LowRankPass : uint8_t {
  // M = gradient + error, into the error of this step. Q = the last step's made orthonormal, or random where that is
  // zero. P = M Q, into its message.
  kMakeP,
  // P = its message made orthonormal. Q = M' P, into its message.
  kMakeQ,
  // Q = its message. gradient = P Q'. error = M - share P Q'.
  kDecompress,
  // Without matrices: unless *nonfinite, the step is kept.
  kKeep,
};

// Rows whose part of Q one block of a GPU adds up, and how many such parts there are.
DDP_HOST_DEVICE inline size_t LowRankChunkRows(size_t rows) {
  constexpr size_t kLeast = 256, kMostChunks = 64;
  const size_t even = (rows + kMostChunks - 1) / kMostChunks;
  return even < kLeast ? kLeast : even;
}
DDP_HOST_DEVICE inline size_t LowRankChunks(size_t rows) {
  return (rows + LowRankChunkRows(rows) - 1) / LowRankChunkRows(rows);
}

// Number `index` of a random sequence (splitmix64; Steele, Lea and Flood, 2014). Any number can be computed by itself.
DDP_HOST_DEVICE inline uint64_t LowRankRandom(uint64_t seed, uint64_t index) {
  uint64_t x = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What element `index` of Q begins with, from -1 to 1. Steps differ, those of a captured graph too.
DDP_HOST_DEVICE inline float LowRankStart(uint64_t seed, uint32_t kept, uint64_t index) {
  return static_cast<float>(LowRankRandom(LowRankRandom(seed, kept), index) >> 40) * 0x1p-23f - 1;
}

// A basis vector of which orthogonalisation leaves less than this is one that depends on those before: what is left is
// rounding error.
inline constexpr float kDependent = 1e-5f;

}  // namespace ddp

#endif  // LIBDDP_DEVICE_LOW_RANK_H_
