// SPDX-License-Identifier: Apache-2.0
#include "examples/data/sampler.h"

#include <algorithm>
#include <set>
#include <vector>

#include "tests/support/catch.h"

namespace examples {
namespace {

using Samples = std::vector<uint32_t>;

// The samples of global batch b of an epoch, all ranks together, sorted.
Samples GlobalBatch(SamplerOptions options, uint64_t epoch, size_t b) {
  Samples all;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    DistributedSampler sampler(options);
    sampler.SetEpoch(epoch);
    const absl::Span<const uint32_t> part = sampler.Batch(b);
    all.insert(all.end(), part.begin(), part.end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

Samples Epoch(const SamplerOptions& options, uint64_t epoch) {
  DistributedSampler sampler(options);
  sampler.SetEpoch(epoch);
  Samples all;
  for (size_t b = 0; b < sampler.batches(); ++b) {
    const absl::Span<const uint32_t> part = sampler.Batch(b);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace

TEST_CASE("a global batch holds the same samples at any world size") {
  for (const bool drop_last : {false, true}) {
    const SamplerOptions one = {.samples = 101, .batch = 12, .seed = 7, .drop_last = drop_last};
    const size_t batches = DistributedSampler(one).batches();
    CHECK(batches == (drop_last ? 8 : 9));
    for (const int world_size : {2, 3, 4, 6}) {
      SamplerOptions many = one;
      many.world_size = world_size;
      many.batch = 12 / static_cast<size_t>(world_size);
      REQUIRE(DistributedSampler(many).batches() == batches);
      for (size_t b = 0; b < batches; ++b) CHECK(GlobalBatch(many, 3, b) == GlobalBatch(one, 3, b));
    }
  }
}

TEST_CASE("rank r takes every n-th sample of a global batch, from the r-th") {
  SamplerOptions options = {.samples = 50, .batch = 10};
  DistributedSampler all(options);
  options.batch = 5;
  options.world_size = 2;
  for (options.rank = 0; options.rank < 2; ++options.rank) {
    DistributedSampler mine(options);
    for (size_t i = 0; i < 5; ++i) CHECK(mine.Batch(2)[i] == all.Batch(2)[2 * i + static_cast<size_t>(options.rank)]);
  }
}

TEST_CASE("an epoch has each sample once; a last batch is dropped or filled from the start") {
  SamplerOptions options = {.samples = 23, .batch = 5};
  Samples padded = Epoch(options, 1);
  REQUIRE(padded.size() == 25);
  CHECK(padded[23] == padded[0]);
  CHECK(padded[24] == padded[1]);
  CHECK(std::set<uint32_t>(padded.begin(), padded.begin() + 23).size() == 23);

  options.drop_last = true;
  const Samples dropped = Epoch(options, 1);
  REQUIRE(dropped.size() == 20);
  CHECK(std::equal(dropped.begin(), dropped.end(), padded.begin()));
}

TEST_CASE("fewer samples than a global batch") {
  SamplerOptions options = {.samples = 3, .batch = 8};
  CHECK(DistributedSampler(options).batches() == 1);
  const Samples epoch = Epoch(options, 0);
  CHECK(epoch.size() == 8);
  CHECK(std::set<uint32_t>(epoch.begin(), epoch.end()).size() == 3);
  options.drop_last = true;
  CHECK(DistributedSampler(options).batches() == 0);
}

TEST_CASE("the order depends on the seed and the epoch, and nothing else") {
  const SamplerOptions options = {.samples = 1000, .batch = 10, .seed = 5};
  SamplerOptions other = options;
  other.seed = 6;
  CHECK(Epoch(options, 2) == Epoch(options, 2));
  CHECK(Epoch(options, 2) != Epoch(options, 3));
  CHECK(Epoch(options, 2) != Epoch(other, 2));
  CHECK(Epoch(options, 1) != Epoch(other, 0));
  // Going back to an epoch gives its order again.
  DistributedSampler sampler(options);
  sampler.SetEpoch(4);
  const Samples first(sampler.Batch(0).begin(), sampler.Batch(0).end());
  sampler.SetEpoch(5);
  sampler.SetEpoch(4);
  CHECK(Samples(sampler.Batch(0).begin(), sampler.Batch(0).end()) == first);
}

TEST_CASE("every order is equally likely") {
  // The 24 orders of four samples over 24,000 epochs: each about 1,000 times (standard deviation 31).
  std::vector<int> seen(256);
  DistributedSampler sampler({.samples = 4, .batch = 4});
  for (uint64_t epoch = 0; epoch < 24'000; ++epoch) {
    sampler.SetEpoch(epoch);
    const absl::Span<const uint32_t> order = sampler.Batch(0);
    ++seen[order[0] * 64 + order[1] * 16 + order[2] * 4 + order[3]];
  }
  CHECK(std::count(seen.begin(), seen.end(), 0) == 256 - 24);
  for (const int count : seen) {
    if (count > 0) CHECK((count > 840 && count < 1160));
  }
}

TEST_CASE("evaluation sees each sample once") {
  for (const int world_size : {1, 2, 3, 4, 7}) {
    Samples all;
    for (int rank = 0; rank < world_size; ++rank) {
      const Samples share = EvaluationShare(10, rank, world_size);
      all.insert(all.end(), share.begin(), share.end());
    }
    std::sort(all.begin(), all.end());
    CHECK(all == Samples{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  }
  CHECK(EvaluationShare(2, 3, 4).empty());
}

}  // namespace examples
