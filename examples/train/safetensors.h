// Weights as other programs read and write them: the safetensors format.
//
//   8 bytes   length of the header, little-endian
//   header    JSON: {"0.weight": {"dtype": "F32", "shape": [32, 1, 3, 3], "data_offsets": [0, 1152]}, ...}, with an
//             entry "__metadata__" of anything else; may end in spaces
//   data      the tensors' elements, row-major and little-endian, at those offsets, without gaps
//
// With the names that PyTorch's state_dict has, which nn::Model has, save_file(model.state_dict(), path) of the Python
// package writes what we read, and load_state_dict(load_file(path)) reads what we write.
#ifndef EXAMPLES_TRAIN_SAFETENSORS_H_
#define EXAMPLES_TRAIN_SAFETENSORS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "examples/train/checkpoint.h"

namespace examples {

// Replaces `path` as a whole or leaves it as it was: see AtomicFile. Beside each "X.running_var" goes PyTorch's
// "X.num_batches_tracked", which says `batches`.
absl::Status SaveSafetensors(const std::string& path, absl::Span<const Tensor> tensors, int64_t batches);

// Fills `tensors`, each of which the file holds in float32 with that shape; it holds no others, but for
// "num_batches_tracked". On failure no tensor has been touched, and the error says in one line what is wrong with which
// file or tensor, and the remedy.
absl::Status LoadSafetensors(const std::string& path, absl::Span<const Tensor> tensors);

// LoadSafetensors on the bytes of a file: a pure function that any input is safe for. Errors do not name the file.
absl::Status DecodeSafetensors(absl::Span<const uint8_t> file, absl::Span<const Tensor> tensors);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_SAFETENSORS_H_
