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

// Grey images, one byte per pixel, kept as they are in the file: a quarter of the memory of floats, and a batch is
// converted while it is gathered anyway.
struct Images {
  std::vector<uint8_t> pixels;  // count() images of height * width, row-major
  std::vector<uint8_t> labels;  // below Dataset::classes

  size_t count() const { return labels.size(); }
};

struct Dataset {
  std::string name;  // for people: "digits (embedded)", or the folder
  int height = 0;
  int width = 0;
  int classes = 0;
  Images train;
  Images test;
  // Of all pixels of the training images. A model sees (pixel - mean) / deviation.
  float mean = 0;
  float deviation = 1;

  int features() const { return height * width; }
};

// `source` is a folder with MNIST's four IDX files (each plain or .gz), or empty or "digits" for the embedded data set.
// An error names the file, what is wrong with it, and the remedy.
absl::StatusOr<Dataset> LoadDataset(const std::string& source);

// The UCI optical digits that are built into the program: 1,437 images for training, 360 for testing.
Dataset EmbeddedDigits();

// The data set in the IDX files of `folder`: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte
// and t10k-labels-idx1-ubyte, as MNIST, Fashion-MNIST and their kin are distributed.
absl::StatusOr<Dataset> LoadIdxFolder(const std::string& folder);

// Fills in mean and deviation.
void Normalize(Dataset& dataset);

// Writes the images at `indices`, normalised, to consecutive rows of `pixels`, and their labels to `labels`. Allocates
// nothing.
void GatherBatch(const Dataset& dataset, const Images& images, absl::Span<const uint32_t> indices, float* pixels,
                 int32_t* labels);

}  // namespace examples

#endif  // EXAMPLES_DATA_DATASET_H_
