// Labelled images in memory, and the floats that a model is fed with.
#ifndef EXAMPLES_DATA_DATASET_H_
#define EXAMPLES_DATA_DATASET_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace examples {

// Images, one byte per pixel and channel, kept as they are in the file: a quarter of the memory of floats, and a batch
// is converted while it is gathered anyway.
struct Images {
  std::vector<uint8_t> pixels;  // count() images of channels * height * width, row-major: one channel after the other
  std::vector<uint8_t> labels;  // below Dataset::classes

  size_t count() const { return labels.size(); }
};

struct Dataset {
  std::string name;  // for people: "digits (embedded)", or the folder
  int channels = 1;
  int height = 0;
  int width = 0;
  int classes = 0;
  bool mirrored_alike = false;  // an image that is mirrored left to right is still of its class
  Images train;
  Images test;
  // Of all pixels of the training images, one number for each channel. A model sees (pixel - mean) / deviation.
  std::vector<float> mean;
  std::vector<float> deviation;

  int features() const { return channels * height * width; }
};

// `source` is a folder with MNIST's four IDX files (each plain or .gz), or with CIFAR-10's six binary files (or one
// that they were unpacked in), or empty or "digits" for the embedded data set. An error names the file, what is wrong
// with it, and the remedy.
absl::StatusOr<Dataset> LoadDataset(const std::string& source);

// The UCI optical digits that are built into the program: 1,437 images for training, 360 for testing.
Dataset EmbeddedDigits();

// The data set in the IDX files of `folder`: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte
// and t10k-labels-idx1-ubyte, as MNIST, Fashion-MNIST and their kin are distributed.
absl::StatusOr<Dataset> LoadIdxFolder(const std::string& folder);

// Images of random pixels with random labels of 10 classes: 4,096 for training, 512 for testing.
Dataset SyntheticImages(int channels, int height, int width);

// Fills in mean and deviation.
void Normalize(Dataset& dataset);

// What is done to training images so that a model does not see the same ones in each epoch.
struct Augmentation {
  // A window of the image's size is cut, at a random place, out of the image with so many black pixels on each side.
  int crop_padding = 0;
  // Every other image, at random, is mirrored left to right.
  bool flip = false;
  // An image's fate depends on these and its index alone: not on the batch, or the rank, that it is dealt to.
  uint64_t seed = 0;
  uint64_t epoch = 0;

  bool any() const { return crop_padding > 0 || flip; }
};

// Writes the images at `indices`, augmented and normalised, to consecutive rows of `pixels`, and their labels to
// `labels`. Allocates nothing.
void GatherBatch(const Dataset& dataset, const Images& images, absl::Span<const uint32_t> indices,
                 const Augmentation& augmentation, float* pixels, int32_t* labels);

}  // namespace examples

#endif  // EXAMPLES_DATA_DATASET_H_
