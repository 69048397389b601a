// SPDX-License-Identifier: Apache-2.0
// Labelled images, in memory or in JPEG files, and their conversion to the floats that a model reads.
#ifndef EXAMPLES_DATA_DATASET_H_
#define EXAMPLES_DATA_DATASET_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace examples {

// Images with one byte per pixel and channel, as in the file. This takes a quarter of the memory of floats; each batch
// is converted when it is gathered.
struct Images {
  std::vector<uint8_t> pixels;   // stored() images of channels * height * width, row-major: one channel after the other
  std::vector<uint16_t> labels;  // below Dataset::classes
  // If not 0, so many images are in `pixels`, and image i looks like image i % `distinct`.
  size_t distinct = 0;
  // If not empty, the images are in these JPEG files, and `pixels` is empty.
  std::vector<std::string> files = {};

  size_t count() const { return labels.size(); }
  size_t stored() const { return distinct == 0 ? count() : distinct; }
};

struct Dataset {
  std::string name;  // to print: "digits (embedded)", or the folder
  int channels = 1;
  int height = 0;
  int width = 0;
  int classes = 0;
  int margin = 0;               // files are decoded with so many pixels more on each side, into which crops may reach
  bool mirrored_alike = false;  // mirroring an image left to right keeps its class
  Images train;
  Images test;
  // Mean and standard deviation of all training pixels, per channel. A model sees (pixel - mean) / deviation.
  std::vector<float> mean;
  std::vector<float> deviation;

  int features() const { return channels * height * width; }
};

struct ImageSize {
  int channels = 1;
  int height = 28;
  int width = 28;
};

// Reads a data set. `source` is a folder with MNIST's four IDX files (each plain or .gz), a folder with CIFAR-10's six
// binary files (or the folder in which their archive was unpacked), a folder of JPEG files (see jpeg_folder.h), which
// are scaled to `size`, or, for the embedded data set, empty or "digits". An error names the file, what is wrong with
// it, and the remedy.
absl::StatusOr<Dataset> LoadDataset(const std::string& source, const ImageSize& size = {});

// Returns the built-in UCI optical digits: 1,437 images for training, 360 for testing.
Dataset EmbeddedDigits();

// Where they come from. Their licence, CC BY 4.0, asks programs that contain them to say so.
inline constexpr char kDigitsAttribution[] =
    R"(The built-in images: Optical Recognition of Handwritten Digits. E. Alpaydin, C. Kaynak (1998).
UCI Machine Learning Repository, https://doi.org/10.24432/C50P49. Licensed under CC BY 4.0,
https://creativecommons.org/licenses/by/4.0/. Changed: the test part alone, in another notation.
)";

// Reads the data set in the IDX files of `folder`: train-images-idx3-ubyte, train-labels-idx1-ubyte,
// t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte. MNIST, Fashion-MNIST and similar sets use this format.
absl::StatusOr<Dataset> LoadIdxFolder(const std::string& folder);

// Returns images of random pixels with random labels of so many classes: 32,768 for training and 512 for testing; if an
// image takes more than 64 KiB, 8,192 and 32. Those for training repeat after 4,096 and 256, labels included: they take
// little memory, and an epoch has many steps.
Dataset SyntheticImages(int channels, int height, int width, int classes = 10);

// Computes mean and deviation.
void Normalize(Dataset& dataset);

// Random changes to training images, so that a model does not see the same images in each epoch.
struct Augmentation {
  // Adds this many black pixels on each side, and crops a window of the original size at a random place.
  int crop_padding = 0;
  // Mirrors a random half of the images left to right.
  bool flip = false;
  // The changes to an image depend only on these two and on its index, not on its batch or rank.
  uint64_t seed = 0;
  uint64_t epoch = 0;

  bool any() const { return crop_padding > 0 || flip; }
};

// Writes the images at `indices`, augmented and normalised, to consecutive rows of `pixels`, and their labels to
// `labels`. Images in memory always succeed, and need no further memory; files are decoded by `threads` threads. An
// error names the file; of several, the first one's.
absl::Status GatherBatch(const Dataset& dataset, const Images& images, absl::Span<const uint32_t> indices,
                         const Augmentation& augmentation, float* pixels, int32_t* labels, int threads = 1);

}  // namespace examples

#endif  // EXAMPLES_DATA_DATASET_H_
