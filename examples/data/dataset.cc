// SPDX-License-Identifier: Apache-2.0
#include "examples/data/dataset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "examples/data/cifar.h"
#include "examples/data/jpeg.h"
#include "examples/data/jpeg_folder.h"
#include "examples/data/random.h"

namespace examples {
namespace {

// Where a model's image is cut out of the one in memory: its pixel (y, x) is that at (y + down, x + right), or at
// (y + down, width - 1 - x + right) if flipped, and black where there is none.
struct Window {
  int down = 0;
  int right = 0;
  bool flip = false;
};

Window DrawWindow(const Augmentation& augmentation, uint32_t index) {
  Window window;
  if (!augmentation.any()) return window;
  Random random(augmentation.seed ^ 0x9d39247e33776d41, augmentation.epoch << 32 | index);
  const auto shift = [&] {
    return static_cast<int>(random.Below(2 * static_cast<uint32_t>(augmentation.crop_padding) + 1)) -
           augmentation.crop_padding;
  };
  window.down = shift();
  window.right = shift();
  window.flip = augmentation.flip && random.Below(2) == 1;
  return window;
}

void CopyPlane(const uint8_t* __restrict from, size_t pixels, float scale, float shift, float* __restrict to) {
  for (size_t i = 0; i < pixels; ++i) to[i] = static_cast<float>(from[i]) * scale + shift;
}

// The same through a window, from a plane that has `margin` pixels more on each side.
void CopyWindow(const uint8_t* from, int height, int width, int margin, const Window& window, float scale, float shift,
                float* to) {
  const float black = shift;
  const int rows = height + 2 * margin, columns = width + 2 * margin;
  for (int y = 0; y < height; ++y, to += width) {
    const int row = y + window.down + margin;
    if (row < 0 || row >= rows) {
      std::fill_n(to, width, black);
      continue;
    }
    const uint8_t* pixels = from + static_cast<ptrdiff_t>(row) * columns;
    for (int x = 0; x < width; ++x) {
      const int column = (window.flip ? width - 1 - x : x) + window.right + margin;
      to[x] = column < 0 || column >= columns ? black : static_cast<float>(pixels[column]) * scale + shift;
    }
  }
}

// One image, whose planes have `margin` pixels more on each side.
void CopyImage(const Dataset& dataset, const uint8_t* from, int margin, const Augmentation& augmentation,
               uint32_t index, float* to) {
  const size_t plane = static_cast<size_t>(dataset.height) * static_cast<size_t>(dataset.width);
  const size_t from_plane =
      static_cast<size_t>(dataset.height + 2 * margin) * static_cast<size_t>(dataset.width + 2 * margin);
  const Window window = DrawWindow(augmentation, index);
  for (size_t channel = 0; channel < static_cast<size_t>(dataset.channels);
       ++channel, from += from_plane, to += plane) {
    const float scale = 1.0f / dataset.deviation[channel];
    const float shift = -dataset.mean[channel] * scale;
    if (augmentation.any() || margin > 0) {
      CopyWindow(from, dataset.height, dataset.width, margin, window, scale, shift, to);
    } else {
      CopyPlane(from, plane, scale, shift, to);
    }
  }
}

// Rows `first`, `first` + `step` ... Returns the first row that failed, and why.
std::pair<size_t, absl::Status> DecodeRows(const Dataset& dataset, const Images& images,
                                           absl::Span<const uint32_t> indices, const Augmentation& augmentation,
                                           float* pixels, size_t first, size_t step) {
  const std::unique_ptr<JpegDecoder> decoder = MakeJpegDecoder();
  const int height = dataset.height + 2 * dataset.margin, width = dataset.width + 2 * dataset.margin;
  std::vector<uint8_t> planes(static_cast<size_t>(dataset.channels) * static_cast<size_t>(height) *
                              static_cast<size_t>(width));
  for (size_t row = first; row < indices.size(); row += step) {
    const uint32_t index = indices[row];
    absl::Status status = decoder->Decode(images.files[index], dataset.channels, height, width, planes.data());
    if (!status.ok()) return {row, std::move(status)};
    CopyImage(dataset, planes.data(), dataset.margin, augmentation, index,
              pixels + row * static_cast<size_t>(dataset.features()));
  }
  return {indices.size(), absl::OkStatus()};
}

absl::Status DecodeBatch(const Dataset& dataset, const Images& images, absl::Span<const uint32_t> indices,
                         const Augmentation& augmentation, float* pixels, int threads) {
  const auto step = std::min(static_cast<size_t>(threads), indices.size());
  std::vector<std::pair<size_t, absl::Status>> results(step, {indices.size(), absl::OkStatus()});
  const auto work = [&](size_t first) {
    try {
      results[first] = DecodeRows(dataset, images, indices, augmentation, pixels, first, step);
    } catch (const std::bad_alloc&) {
      results[first] = {0, absl::ResourceExhaustedError("no memory to decode a JPEG file")};
    }
  };
  std::vector<std::thread> others;
  for (size_t first = 1; first < step; ++first) others.emplace_back(work, first);
  if (step > 0) work(0);
  for (std::thread& other : others) other.join();
  const auto worst =
      std::min_element(results.begin(), results.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return worst == results.end() ? absl::OkStatus() : worst->second;
}

}  // namespace

absl::StatusOr<Dataset> LoadDataset(const std::string& source, const ImageSize& size) {
  if (source.empty() || source == "digits") return EmbeddedDigits();
  if (const std::string cifar = FindCifarFolder(source); !cifar.empty()) return LoadCifarFolder(cifar);
  if (IsJpegFolder(source)) return LoadJpegFolder(source, size);
  return LoadIdxFolder(source);
}

Dataset SyntheticImages(int channels, int height, int width, int classes) {
  Dataset dataset;
  dataset.name = "synthetic";
  dataset.channels = channels;
  dataset.height = height;
  dataset.width = width;
  dataset.classes = classes;
  Random random(1, 0);
  const bool large = dataset.features() > 1 << 16;
  for (const auto& [images, stored, count] : {std::tuple(&dataset.train, large ? 256 : 4096, large ? 8192 : 32768),
                                              std::tuple(&dataset.test, large ? 32 : 512, large ? 32 : 512)}) {
    images->distinct = static_cast<size_t>(stored);
    images->pixels.resize(images->distinct * static_cast<size_t>(dataset.features()));
    images->labels.resize(static_cast<size_t>(count));
    for (uint8_t& pixel : images->pixels) pixel = static_cast<uint8_t>(random.Next() >> 56);
    for (size_t i = 0; i < images->count(); ++i) {
      images->labels[i] = i < images->distinct ? static_cast<uint16_t>(random.Below(static_cast<uint32_t>(classes)))
                                               : images->labels[i - images->distinct];
    }
  }
  Normalize(dataset);
  return dataset;
}

void Normalize(Dataset& dataset) {
  const size_t plane = static_cast<size_t>(dataset.height) * static_cast<size_t>(dataset.width);
  const auto channels = static_cast<size_t>(dataset.channels);
  dataset.mean.clear();
  dataset.deviation.clear();
  for (size_t channel = 0; channel < channels; ++channel) {
    // By a histogram: exact, and so the same on every machine, whatever the order of summation.
    std::array<uint64_t, 256> histogram = {};
    for (size_t image = 0; image < dataset.train.stored(); ++image) {
      const uint8_t* pixels = dataset.train.pixels.data() + (image * channels + channel) * plane;
      for (size_t i = 0; i < plane; ++i) ++histogram[pixels[i]];
    }
    uint64_t sum = 0, squares = 0;
    for (uint64_t value = 0; value < histogram.size(); ++value) {
      sum += value * histogram[value];
      squares += value * value * histogram[value];
    }
    const double count = static_cast<double>(dataset.train.stored() * plane);
    const double mean = static_cast<double>(sum) / count;
    const double variance = static_cast<double>(squares) / count - mean * mean;
    dataset.mean.push_back(static_cast<float>(mean));
    dataset.deviation.push_back(variance > 0 ? static_cast<float>(std::sqrt(variance)) : 1.0f);
  }
}

absl::Status GatherBatch(const Dataset& dataset, const Images& images, absl::Span<const uint32_t> indices,
                         const Augmentation& augmentation, float* pixels, int32_t* labels, int threads) {
  const size_t features = static_cast<size_t>(dataset.features());
  const auto stored = [&](uint32_t index) { return images.pixels.data() + index % images.stored() * features; };
  for (size_t row = 0; row < indices.size(); ++row) labels[row] = images.labels[indices[row]];
  if (!images.files.empty()) return DecodeBatch(dataset, images, indices, augmentation, pixels, threads);
  for (size_t row = 0; row < indices.size(); ++row) {
    // Shuffled rows come from all over memory: ask for the next one while this one is converted.
    if (row + 1 < indices.size()) {
      const uint8_t* next = stored(indices[row + 1]);
      for (size_t i = 0; i < features; i += 64) __builtin_prefetch(next + i);
    }
    CopyImage(dataset, stored(indices[row]), 0, augmentation, indices[row], pixels + row * features);
  }
  return absl::OkStatus();
}

}  // namespace examples
