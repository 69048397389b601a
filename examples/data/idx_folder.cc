// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/data/dataset.h"
#include "examples/data/idx.h"

namespace examples {
namespace {

constexpr int kClasses = 10;
constexpr size_t kLargestSide = 4096;

struct Part {
  Images images;
  size_t height = 0;
  size_t width = 0;
};

absl::StatusOr<Part> ReadPart(const std::string& folder, const std::string& prefix) {
  const std::string images_name = prefix + "-images-idx3-ubyte";
  const std::string labels_name = prefix + "-labels-idx1-ubyte";
  absl::StatusOr<IdxArray> images = ReadIdxFile(folder, images_name, 3);
  if (!images.ok()) return images.status();
  absl::StatusOr<IdxArray> labels = ReadIdxFile(folder, labels_name, 1);
  if (!labels.ok()) return labels.status();

  const auto refuse = [&](auto&&... what) {
    return absl::InvalidArgumentError(absl::StrCat("cannot use the folder ", folder, ": ", what...,
                                                   "; the files do not belong together, fetch them anew"));
  };
  if (images->dims[0] != labels->dims[0]) {
    return refuse(images_name, " has ", images->dims[0], " images, ", labels_name, " has ", labels->dims[0], " labels");
  }
  if (images->dims[1] > kLargestSide || images->dims[2] > kLargestSide) {
    return refuse(images_name, " has images of ", images->dims[1], " x ", images->dims[2], " pixels");
  }
  const auto largest = std::max_element(labels->bytes.begin(), labels->bytes.end());
  if (*largest >= kClasses) {
    return refuse(labels_name, " has the label ", int{*largest}, " at position ", largest - labels->bytes.begin(),
                  " where 0 to ", kClasses - 1, " are expected");
  }
  return Part{
      {std::move(images->bytes), {labels->bytes.begin(), labels->bytes.end()}}, images->dims[1], images->dims[2]};
}

}  // namespace

absl::StatusOr<Dataset> LoadIdxFolder(const std::string& folder) {
  absl::StatusOr<Part> train = ReadPart(folder, "train");
  if (!train.ok()) return train.status();
  absl::StatusOr<Part> test = ReadPart(folder, "t10k");
  if (!test.ok()) return test.status();
  if (train->height != test->height || train->width != test->width) {
    return absl::InvalidArgumentError(absl::StrCat("cannot use the folder ", folder, ": training images have ",
                                                   train->height, " x ", train->width, " pixels, test images ",
                                                   test->height, " x ", test->width,
                                                   "; the files do not belong together, fetch them anew"));
  }
  Dataset dataset;
  dataset.name = folder;
  dataset.height = static_cast<int>(train->height);
  dataset.width = static_cast<int>(train->width);
  dataset.classes = kClasses;
  dataset.train = std::move(train->images);
  dataset.test = std::move(test->images);
  Normalize(dataset);
  return dataset;
}

}  // namespace examples
