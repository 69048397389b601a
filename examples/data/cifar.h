// Reader of CIFAR-10's binary files.
//
// A file is images, one after the other, of 3,073 bytes each: the label, from 0 to 9, and 3 x 32 x 32 pixels: red,
// green, blue, each row by row.
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

// Adds the images of a whole file to `images`, and returns how many. A pure function: any input is answered with at
// least one image or with InvalidArgument, saying in one line what is wrong, and then `images` is as it was.
absl::StatusOr<size_t> DecodeCifar(absl::Span<const uint8_t> file, Images& images);

// Whether `folder`, or cifar-10-batches-bin in it as the archive unpacks, looks like CIFAR-10: which of both, else
// empty.
std::string FindCifarFolder(const std::string& folder);

// The data set in the files data_batch_1.bin to data_batch_5.bin and test_batch.bin of `folder`, which hold the same
// number of images each (10,000 where they are complete). Errors name the file and the remedy.
absl::StatusOr<Dataset> LoadCifarFolder(const std::string& folder);

}  // namespace examples

#endif  // EXAMPLES_DATA_CIFAR_H_
