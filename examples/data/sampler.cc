// SPDX-License-Identifier: Apache-2.0
#include "examples/data/sampler.h"

#include <numeric>
#include <utility>

#include "examples/data/random.h"

namespace examples {

DistributedSampler::DistributedSampler(const SamplerOptions& options)
    : rank_(static_cast<size_t>(options.rank)),
      world_size_(static_cast<size_t>(options.world_size)),
      seed_(options.seed),
      order_(options.samples),
      batch_(options.batch) {
  batches_ = (options.samples + (options.drop_last ? 0 : global_batch() - 1)) / global_batch();
  SetEpoch(0);
}

void DistributedSampler::SetEpoch(uint64_t epoch) {
  // Fisher-Yates: each place, from the last, gets one of those not yet placed.
  Random random(seed_, epoch);
  std::iota(order_.begin(), order_.end(), 0u);
  for (size_t i = order_.size(); i > 1; --i) {
    std::swap(order_[i - 1], order_[random.Below(static_cast<uint32_t>(i))]);
  }
}

absl::Span<const uint32_t> DistributedSampler::Batch(size_t b) {
  size_t position = b * global_batch() + rank_;
  for (uint32_t& sample : batch_) {
    sample = order_[position % order_.size()];
    position += world_size_;
  }
  return batch_;
}

std::vector<uint32_t> EvaluationShare(size_t samples, int rank, int world_size) {
  std::vector<uint32_t> share;
  for (size_t i = static_cast<size_t>(rank); i < samples; i += static_cast<size_t>(world_size)) {
    share.push_back(static_cast<uint32_t>(i));
  }
  return share;
}

}  // namespace examples
