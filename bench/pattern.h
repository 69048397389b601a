// SPDX-License-Identifier: Apache-2.0
// Data whose reduction is known exactly: small integers, different in every element and on every rank.
#ifndef BENCH_PATTERN_H_
#define BENCH_PATTERN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/collective.h"

namespace bench {

class Pattern {
 public:
  explicit Pattern(const Case& c);

  // Writes this rank's input, which begins at `in`.
  void Fill(void* in, uint32_t salt) const;

  // How many elements of this rank's output are not what they must be after all ranks' Fill.
  int64_t CountWrong(const void* out, uint32_t salt) const { return Count(out, salt, false); }

  // The same number in every element: quick to write, as a backward pass would. Looks at three elements of each part.
  void FillEqual(void* in) const;
  int64_t CountWrongEqual(const void* out) const { return Count(out, 0, true); }

 private:
  int Value(size_t index, int rank, uint32_t salt) const;
  int Reduced(size_t index, uint32_t salt) const;
  uint64_t Encode(int value, int divisor) const;
  int64_t Count(const void* out, uint32_t salt, bool equal) const;

  template <typename Word>
  bool Wrong(Word got, int want) const;
  template <typename Fn>
  auto WithWord(Fn&& fn) const;

  const Case case_;
  const std::vector<Segment> segments_;
  const ddp::ReduceOp op_;               // kSum if nothing is reduced
  std::vector<uint64_t> contributions_;  // bits of each value that a rank may contribute
  std::vector<uint64_t> results_;        // bits of each value that may come out
};

}  // namespace bench

#endif  // BENCH_PATTERN_H_
