// SPDX-License-Identifier: Apache-2.0
// Reader of IDX files, the format of MNIST.
//
// A big-endian header, followed by the elements in row-major order up to the end of the file:
//   0x00 0x00 <type> <n>      type 0x08: unsigned bytes; n dimensions
//   n times 4 bytes           the dimensions
//   elements
#ifndef EXAMPLES_DATA_IDX_H_
#define EXAMPLES_DATA_IDX_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace examples {

struct IdxArray {
  std::vector<size_t> dims;
  std::vector<uint8_t> bytes;  // their number is the product of dims
};

// Decodes a whole file, plain or gzip-compressed, of unsigned bytes in `rank` dimensions (1 to 8), none of which is 0.
// Accepts any input: it returns an array, or InvalidArgument with one line that says what is wrong. It allocates no
// more than the input can really contain, whatever its header claims.
absl::StatusOr<IdxArray> DecodeIdx(absl::Span<const uint8_t> file, int rank);

// Reads and decodes `folder`/`name`, or `folder`/`name`.gz if there is no plain file. Errors (NotFound,
// PermissionDenied, InvalidArgument) name the file and the remedy.
absl::StatusOr<IdxArray> ReadIdxFile(const std::string& folder, absl::string_view name, int rank);

}  // namespace examples

#endif  // EXAMPLES_DATA_IDX_H_
