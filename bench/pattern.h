// Data whose reduction is known exactly: small integers, different in every element and on every rank.
#ifndef BENCH_PATTERN_H_
#define BENCH_PATTERN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ddp/types.h"

namespace bench {

class Pattern {
 public:
  Pattern(ddp::DType dtype, ddp::ReduceOp op, int ranks);

  // What `rank` contributes.
  void Fill(void* data, size_t count, int rank, uint32_t salt) const;

  // How many elements of the reduced array are not what they must be.
  int64_t CountWrong(const void* data, size_t count, uint32_t salt) const;

  // The same contribution in every element: quick to write, as a backward pass would.
  void FillEqual(void* data, size_t count, int rank) const;

  // Looks at three elements of an array that was reduced after FillEqual.
  int64_t CountWrongEqual(const void* data, size_t count) const;

 private:
  int Value(size_t index, int rank, uint32_t salt) const;
  int Reduced(size_t index, uint32_t salt) const;
  uint64_t Encode(int value, int divisor) const;

  template <typename Word>
  bool Wrong(Word got, int want) const;
  template <typename Fn>
  auto WithWord(Fn&& fn) const;

  const ddp::DType dtype_;
  const ddp::ReduceOp op_;
  const int ranks_;
  std::vector<uint64_t> contributions_;  // bits of each value that a rank may contribute
  std::vector<uint64_t> results_;        // bits of each value that may come out
};

}  // namespace bench

#endif  // BENCH_PATTERN_H_
