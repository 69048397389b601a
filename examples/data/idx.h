// Reader of IDX files, the format of MNIST.
//
// A big-endian header, then the elements, row-major, to the end of the file:
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
  std::vector<uint8_t> bytes;  // as many as the product of dims
};

// Decodes a whole file, plain or gzip-compressed, that holds unsigned bytes in `rank` dimensions (1 to 8), none of them
// 0. A pure function: any input is answered with an array or with InvalidArgument, saying in one line what is wrong.
// Allocates no more than the input can really hold, whatever its header claims.
absl::StatusOr<IdxArray> DecodeIdx(absl::Span<const uint8_t> file, int rank);

// Reads and decodes `folder`/`name`, or `folder`/`name`.gz where there is no plain file. Errors name the file and the
// remedy: NotFound, PermissionDenied, InvalidArgument.
absl::StatusOr<IdxArray> ReadIdxFile(const std::string& folder, absl::string_view name, int rank);

}  // namespace examples

#endif  // EXAMPLES_DATA_IDX_H_
