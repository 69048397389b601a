#include "examples/data/dataset.h"

#include <array>
#include <cmath>

namespace examples {

absl::StatusOr<Dataset> LoadDataset(const std::string& source) {
  if (source.empty() || source == "digits") return EmbeddedDigits();
  return LoadIdxFolder(source);
}

void Normalize(Dataset& dataset) {
  // By a histogram: exact, and so the same on every machine, whatever the order of summation.
  std::array<uint64_t, 256> histogram = {};
  for (const uint8_t pixel : dataset.train.pixels) ++histogram[pixel];
  uint64_t sum = 0, squares = 0;
  for (uint64_t value = 0; value < histogram.size(); ++value) {
    sum += value * histogram[value];
    squares += value * value * histogram[value];
  }
  const double count = static_cast<double>(dataset.train.pixels.size());
  const double mean = static_cast<double>(sum) / count;
  const double variance = static_cast<double>(squares) / count - mean * mean;
  dataset.mean = static_cast<float>(mean);
  dataset.deviation = variance > 0 ? static_cast<float>(std::sqrt(variance)) : 1.0f;
}

void GatherBatch(const Dataset& dataset, const Images& images, absl::Span<const uint32_t> indices, float* pixels,
                 int32_t* labels) {
  const size_t features = static_cast<size_t>(dataset.features());
  const float scale = 1.0f / dataset.deviation;
  const float shift = -dataset.mean * scale;
  for (size_t row = 0; row < indices.size(); ++row) {
    const uint8_t* __restrict from = images.pixels.data() + indices[row] * features;
    float* __restrict to = pixels + row * features;
    // Shuffled rows come from all over memory: ask for the next one while this one is converted.
    if (row + 1 < indices.size()) {
      const uint8_t* next = images.pixels.data() + indices[row + 1] * features;
      for (size_t i = 0; i < features; i += 64) __builtin_prefetch(next + i);
    }
    for (size_t i = 0; i < features; ++i) to[i] = static_cast<float>(from[i]) * scale + shift;
    labels[row] = images.labels[indices[row]];
  }
}

}  // namespace examples
