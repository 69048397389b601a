// The bound: how fast can a sum over processes be when nothing but memory and a barrier is in the way? Not a library:
// no other type than float32, no errors, no overlap, buffers that never move.
#ifndef BENCH_SLICE_SUM_H_
#define BENCH_SLICE_SUM_H_

#include <cstddef>
#include <cstdint>

namespace bench {

class SliceSum {
 public:
  // What `ranks` buffers of up to `max_bytes` need.
  static size_t Bytes(int ranks, size_t max_bytes);

  // `memory`: Bytes() bytes of zeros, shared, page-aligned.
  SliceSum(char* memory, int rank, int ranks, size_t max_bytes);

  float* buffer() const { return Buffer(rank_); }

  // The simplest all-reduce, in place over the first `count` floats: when all ranks have come, each sums its own slice
  // over all buffers and stores the sum in all of them; when all have done so, it is over.
  void Run(size_t count);

 private:
  float* Buffer(int rank) const;
  void Meet();

  char* const memory_;
  const int rank_;
  const int ranks_;
  const size_t stride_;
  const int spins_;
  uint32_t turn_ = 0;
};

}  // namespace bench

#endif  // BENCH_SLICE_SUM_H_
