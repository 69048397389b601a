// SPDX-License-Identifier: Apache-2.0
// A data set of JPEG files, sorted into one folder per class, as torchvision's ImageFolder reads it.
#ifndef EXAMPLES_DATA_JPEG_FOLDER_H_
#define EXAMPLES_DATA_JPEG_FOLDER_H_

#include <string>

#include "absl/status/statusor.h"
#include "examples/data/dataset.h"

namespace examples {

// True if `folder` has a subfolder "train".
bool IsJpegFolder(const std::string& folder);

// Lists `folder`/train/CLASS/... and `folder`/val/CLASS/..., with files at any depth. Classes have the order of their
// names, and so have the files of a class. Files are decoded when a batch needs them, scaled to `size`, and normalised
// by the mean and deviation of ImageNet. An error names the file or folder.
absl::StatusOr<Dataset> LoadJpegFolder(const std::string& folder, const ImageSize& size);

}  // namespace examples

#endif  // EXAMPLES_DATA_JPEG_FOLDER_H_
