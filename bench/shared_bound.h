// SPDX-License-Identifier: Apache-2.0
// The bound on one host: how fast an operation between processes is when nothing but memory and a barrier is in the
// way. Not a library: no other type than float32, no errors, no overlap, buffers that never move.
#ifndef BENCH_SHARED_BOUND_H_
#define BENCH_SHARED_BOUND_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/collective.h"

namespace bench {

class SharedBound {
 public:
  // The memory that `ranks` arrays of up to `max_bytes` need, or twice as many if results go to arrays of their own.
  static size_t Bytes(int ranks, size_t max_bytes, bool out_of_place);

  // `memory`: Bytes() bytes of zeros, shared, page-aligned.
  SharedBound(char* memory, int rank, int ranks, size_t max_bytes);

  // `c` as the bound does it: float32, and out of place where that is simpler.
  static Case Like(const Case& c);

  // This rank's buffers for such a case.
  float* In(const Case& c) const { return Array(rank_) + c.InOffset(rank_); }
  float* Out(const Case& c) const { return OutArray(c, rank_) + c.OutOffset(); }

  // When all ranks have come, each copies its results from the others' inputs, or sums its slice over all of them and
  // stores the sum where it is wanted. When all have done so, it is over. `results`: of the case.
  void Run(const Case& c, const std::vector<Segment>& results);

 private:
  float* Array(int index) const;
  float* OutArray(const Case& c, int rank) const { return Array(c.in_place ? rank : ranks_ + rank); }
  void Sum(const Case& c) const;
  void Copy(const Case& c, const std::vector<Segment>& results) const;
  void Meet();

  char* const memory_;
  const int rank_;
  const int ranks_;
  const size_t stride_;
  const int spins_;
  uint32_t turn_ = 0;
};

}  // namespace bench

#endif  // BENCH_SHARED_BOUND_H_
