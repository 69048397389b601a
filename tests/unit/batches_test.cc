// SPDX-License-Identifier: Apache-2.0
// What a model is fed with: batches in their order, and augmented images.
#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "examples/data/dataset.h"
#include "examples/data/sampler.h"
#include "examples/train/batch_loader.h"
#include "tests/support/catch.h"

namespace examples {
namespace {

// Every pixel tells where it was: image, channel, row and column.
Dataset Numbered(int images, int channels, int height, int width) {
  Dataset data;
  data.channels = channels;
  data.height = height;
  data.width = width;
  data.classes = 10;
  for (int i = 0; i < images; ++i) {
    for (int pixel = 0; pixel < data.features(); ++pixel) {
      data.train.pixels.push_back(static_cast<uint8_t>(i * data.features() + pixel + 1));
    }
    data.train.labels.push_back(static_cast<uint8_t>(i % 10));
  }
  data.mean.assign(static_cast<size_t>(channels), 0);
  data.deviation.assign(static_cast<size_t>(channels), 1);
  return data;
}

std::vector<float> Gather(const Dataset& data, uint32_t image, const Augmentation& augmentation) {
  std::vector<float> pixels(static_cast<size_t>(data.features()));
  int32_t label = -1;
  REQUIRE(GatherBatch(data, data.train, {image}, augmentation, pixels.data(), &label).ok());
  CHECK(label == data.train.labels[image]);
  return pixels;
}

TEST_CASE("The loader gives out the sampler's batches, epoch after epoch, from any batch on") {
  const Dataset data = EmbeddedDigits();
  const SamplerOptions options = {.samples = data.train.count(), .batch = 100, .rank = 1, .world_size = 2, .seed = 7};
  DistributedSampler sampler(options);
  BatchLoader loader(data, options, {});
  REQUIRE(loader.batches() == sampler.batches());
  REQUIRE(loader.global_batch() == 200);
  std::vector<float> pixels(100 * 64);
  std::vector<int32_t> labels(100);
  for (const auto& [epoch, first] : {std::pair(0, 0), std::pair(1, 5), std::pair(1, 0), std::pair(4, 7)}) {
    sampler.SetEpoch(static_cast<uint64_t>(epoch));
    loader.Start(static_cast<uint64_t>(epoch), static_cast<size_t>(first));
    // The second time some batches of the epoch are left behind.
    const size_t end = epoch == 1 && first == 5 ? 6 : loader.batches();
    for (size_t b = static_cast<size_t>(first); b < end; ++b) {
      REQUIRE(GatherBatch(data, data.train, sampler.Batch(b), {}, pixels.data(), labels.data()).ok());
      const Batch batch = loader.Next().value();
      CHECK(std::equal(pixels.begin(), pixels.end(), batch.pixels));
      CHECK(std::equal(labels.begin(), labels.end(), batch.labels.begin(), batch.labels.end()));
    }
  }
}

TEST_CASE("A loader that was never asked for anything ends") {
  const Dataset data = EmbeddedDigits();
  BatchLoader idle(data, {.samples = data.train.count(), .batch = 10}, {});
  BatchLoader busy(data, {.samples = data.train.count(), .batch = 10}, {});
  busy.Start(3, 1);
}

TEST_CASE("Each channel is normalised by its own numbers") {
  Dataset data = Numbered(2, 2, 1, 2);  // pixels 1 2 | 3 4, and 5 6 | 7 8
  Normalize(data);
  REQUIRE(data.mean == std::vector<float>{3.5f, 5.5f});
  const std::vector<float> pixels = Gather(data, 1, {});
  const float deviation = data.deviation[0];
  CHECK(deviation * deviation == ddp::testing::Approx(4.25f));
  CHECK(pixels[0] == ddp::testing::Approx(1.5f / deviation));
  CHECK(pixels[3] == ddp::testing::Approx(2.5f / deviation));
}

TEST_CASE("Augmented images are windows of bordered ones, mirrored or not, and depend on seed, epoch and image alone") {
  const Dataset data = Numbered(3, 2, 3, 4);
  std::set<std::vector<float>> seen;
  for (uint64_t epoch = 0; epoch < 400; ++epoch) {
    const Augmentation augmentation = {.crop_padding = 1, .flip = true, .seed = 9, .epoch = epoch};
    const std::vector<float> pixels = Gather(data, 1, augmentation);
    CHECK(pixels == Gather(data, 1, augmentation));
    seen.insert(pixels);
  }
  // Three places down and three right, plain and mirrored: each is seen, and nothing else.
  std::set<std::vector<float>> expected;
  for (const bool flip : {false, true}) {
    for (int down = -1; down <= 1; ++down) {
      for (int right = -1; right <= 1; ++right) {
        std::vector<float> window;
        for (int c = 0; c < 2; ++c) {
          for (int y = down; y < 3 + down; ++y) {
            for (int x = 0; x < 4; ++x) {
              const int column = (flip ? 3 - x : x) + right;
              const bool black = y < 0 || y > 2 || column < 0 || column > 3;
              window.push_back(black ? 0.0f : static_cast<float>(24 + c * 12 + y * 4 + column + 1));
            }
          }
        }
        expected.insert(window);
      }
    }
  }
  CHECK(expected.size() == 18);
  CHECK(seen == expected);
}

TEST_CASE("Synthetic images have the size asked for, all classes, and are the same every time") {
  const Dataset data = SyntheticImages(3, 32, 32);
  CHECK(data.features() == 3072);
  CHECK(data.train.pixels.size() == data.train.stored() * 3072);
  CHECK(data.test.pixels.size() == data.test.count() * 3072);
  CHECK(std::set<uint8_t>(data.train.labels.begin(), data.train.labels.end()).size() == 10);
  CHECK(SyntheticImages(3, 32, 32).train.pixels == data.train.pixels);
  CHECK(data.mean.size() == 3);

  // They repeat, labels included.
  const auto stored = static_cast<uint32_t>(data.train.stored());
  REQUIRE(data.train.count() == 8 * size_t{stored});
  std::vector<float> pixels(3 * 3072);
  std::vector<int32_t> labels(3);
  REQUIRE(GatherBatch(data, data.train, {1, 1 + stored, 2}, {}, pixels.data(), labels.data()).ok());
  CHECK(std::equal(pixels.begin(), pixels.begin() + 3072, pixels.begin() + 3072));
  CHECK_FALSE(std::equal(pixels.begin(), pixels.begin() + 3072, pixels.begin() + 2 * 3072));
  CHECK(labels[0] == labels[1]);
}

}  // namespace
}  // namespace examples
