// SPDX-License-Identifier: Apache-2.0
// Decides which rank trains on which sample, and when.
#ifndef EXAMPLES_DATA_SAMPLER_H_
#define EXAMPLES_DATA_SAMPLER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace examples {

struct SamplerOptions {
  size_t samples = 0;  // number of samples in the data set; at least 1
  size_t batch = 1;    // samples per batch and rank
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 1;
  // If the samples do not fill the last global batch: true drops them, false fills the batch with samples from the
  // start of the epoch.
  bool drop_last = false;
};

// Distributes a shuffled data set over the ranks. A global batch is `batch * world_size` consecutive positions of the
// epoch's order. Rank r of n takes the positions r, r + n, r + 2n, ... of it. So for a fixed batch * world_size, global
// batch b contains the same samples at every world size, and K ranks with batch B / K train like one rank with batch B.
//
// The order depends only on (seed, epoch). It uses its own shuffling algorithm, because the result of std::shuffle
// differs between libraries.
class DistributedSampler {
 public:
  explicit DistributedSampler(const SamplerOptions& options);

  // Shuffles for `epoch`. Allocates no memory.
  void SetEpoch(uint64_t epoch);

  // The number of global batches in an epoch. 0 only with drop_last, if the samples do not fill one batch.
  size_t batches() const { return batches_; }
  size_t global_batch() const { return batch_.size() * world_size_; }

  // Returns this rank's `batch` samples of global batch b < batches(). The result is valid until the next call.
  absl::Span<const uint32_t> Batch(size_t b);

 private:
  size_t rank_;
  size_t world_size_;
  uint64_t seed_;
  size_t batches_;
  std::vector<uint32_t> order_;
  std::vector<uint32_t> batch_;
};

// Returns the samples that `rank` evaluates: rank, rank + world_size, ... Each sample is evaluated by exactly one rank.
std::vector<uint32_t> EvaluationShare(size_t samples, int rank, int world_size);

}  // namespace examples

#endif  // EXAMPLES_DATA_SAMPLER_H_
