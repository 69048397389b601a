// SPDX-License-Identifier: Apache-2.0
// Elements of any dtype as doubles, and what a reduction of them has to give.
#ifndef TESTS_SUPPORT_NUMBERS_H_
#define TESTS_SUPPORT_NUMBERS_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "ddp/types.h"

namespace ddp::testing {

inline constexpr DType kAllDTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                       DType::kInt64,   DType::kInt32,   DType::kInt8,    DType::kUInt8};
// Those that calls are tried with, besides everything else that a call can have. For ThreadSanitizer, which makes them
// slow, one of each size up to 4 bytes: who touches memory when does not depend on more.
#if defined(__SANITIZE_THREAD__)
inline constexpr DType kCallDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kInt8};
#else
inline constexpr const auto& kCallDTypes = kAllDTypes;
#endif
inline constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax,
                                       ReduceOp::kProduct};

// Element i of an array of `dtype`. Set rounds to nearest even; `value` must fit an integer type.
double GetElement(DType dtype, const void* data, size_t i);
void SetElement(DType dtype, void* data, size_t i, double value);

// Rank's contribution at i: a whole number, such that the reduction over up to 4 ranks is exact in every dtype and
// differs between ranks and neighbours.
double WholeNumber(DType dtype, ReduceOp op, int rank, size_t i);

// A float32 whose sums depend on the order of adding.
double Awkward(int rank, size_t i);

// Reduces one element as the contract says: in rank order, with DDP_NODE_SIZE first within the nodes and then over
// them, float32 for float32 and the 16-bit types, scaled after the sum. Not yet rounded to the output's type.
double Reduce(DType dtype, ReduceOp op, absl::Span<const double> by_rank, double prescale = 1, double postscale = 1);

// Ranges that make up `whole`, `pieces` of about the same size.
inline std::vector<Buffer> Cut(const Buffer& whole, size_t pieces) {
  std::vector<Buffer> ranges;
  for (size_t i = 0; i < pieces; ++i) {
    const size_t begin = whole.count * i / pieces, end = whole.count * (i + 1) / pieces;
    ranges.push_back(
        {static_cast<char*>(whole.data) + begin * SizeOf(whole.dtype), end - begin, whole.dtype, whole.device});
  }
  return ranges;
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_NUMBERS_H_
