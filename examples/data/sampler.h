// Which rank sees which sample, and when.
#ifndef EXAMPLES_DATA_SAMPLER_H_
#define EXAMPLES_DATA_SAMPLER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace examples {

struct SamplerOptions {
  size_t samples = 0;  // in the data set; at least 1
  size_t batch = 1;    // per rank
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 1;
  // What becomes of the samples that do not fill a last global batch: left out of the epoch, or (false) that batch is
  // filled up from the epoch's beginning.
  bool drop_last = false;
};

// Deals a shuffled data set to the ranks. A global batch is `batch * world_size` consecutive positions of the epoch's
// order, and rank r takes positions r, r + n, r + 2n, ... of it. So global batch b holds the same samples at every
// world size with the same batch * world_size, and K ranks with batch B / K train like one rank with batch B.
//
// The order depends on (seed, epoch) alone, by an algorithm of our own: std::shuffle's result differs between
// libraries.
class DistributedSampler {
 public:
  explicit DistributedSampler(const SamplerOptions& options);

  // Shuffles for `epoch`. Allocates nothing.
  void SetEpoch(uint64_t epoch);

  // Global batches in an epoch. 0 only with drop_last, when the samples do not fill one.
  size_t batches() const { return batches_; }
  size_t global_batch() const { return batch_.size() * world_size_; }

  // This rank's `batch` samples of global batch b < batches(). Valid until the next call.
  absl::Span<const uint32_t> Batch(size_t b);

 private:
  size_t rank_;
  size_t world_size_;
  uint64_t seed_;
  size_t batches_;
  std::vector<uint32_t> order_;
  std::vector<uint32_t> batch_;
};

// The samples of `rank` when each of `samples` is to be seen exactly once by somebody: rank, rank + world_size, ...
std::vector<uint32_t> EvaluationShare(size_t samples, int rank, int world_size);

}  // namespace examples

#endif  // EXAMPLES_DATA_SAMPLER_H_
