// SPDX-License-Identifier: Apache-2.0
// Reader of CIFAR-10's binary files.
//
// A file is a sequence of images of 3,073 bytes: the label, from 0 to 9, and 3 x 32 x 32 pixels (red, green, blue; each
// row by row).
#ifndef EXAMPLES_DATA_CIFAR_H_
#define EXAMPLES_DATA_CIFAR_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/data/dataset.h"

namespace examples {

// Appends the images of a whole file to `images` and returns their number. Accepts any input: it returns at least 1, or
// InvalidArgument with one line that says what is wrong, and then `images` does not change.
absl::StatusOr<size_t> DecodeCifar(absl::Span<const uint8_t> file, Images& images);

// Returns the folder that contains CIFAR-10: `folder`, or cifar-10-batches-bin in it, as the archive unpacks. Empty if
// neither does.
std::string FindCifarFolder(const std::string& folder);

// Reads the data set in the files data_batch_1.bin to data_batch_5.bin and test_batch.bin of `folder`. Each file must
// contain the same number of images (10,000 in the original). Errors name the file and the remedy.
absl::StatusOr<Dataset> LoadCifarFolder(const std::string& folder);

}  // namespace examples

#endif  // EXAMPLES_DATA_CIFAR_H_
