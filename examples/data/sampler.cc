#include "examples/data/sampler.h"

#include <numeric>
#include <utility>

namespace examples {
namespace {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Random {
 public:
  // The streams of neighbouring seeds and epochs share nothing: both pass through the generator's mixing.
  Random(uint64_t seed, uint64_t epoch) : state_(seed) { state_ = Next() ^ (epoch * 0xd1342543de82ef95); }

  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  // Uniform in 0 .. n - 1, without bias and almost always without a division (Lemire: Fast random integer generation in
  // an interval, 2019).
  uint32_t Below(uint32_t n) {
    uint64_t product = (Next() >> 32) * n;
    if (static_cast<uint32_t>(product) < n) {
      const uint32_t threshold = -n % n;
      while (static_cast<uint32_t>(product) < threshold) product = (Next() >> 32) * n;
    }
    return static_cast<uint32_t>(product >> 32);
  }

 private:
  uint64_t state_;
};

}  // namespace

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
