// SPDX-License-Identifier: Apache-2.0
// Reads and writes weights in the safetensors format, which other programs use too.
//
//   8 bytes   length of the header, little-endian
//   header    JSON: {"0.weight": {"dtype": "F32", "shape": [32, 1, 3, 3], "data_offsets": [0, 1152]}, ...}, and an
//             optional entry "__metadata__"; may end in spaces
//   data      the tensors' elements, row-major and little-endian, at these offsets, without gaps
//
// nn::Model uses the names of PyTorch's state_dict. So these functions read what save_file(model.state_dict(), path) of
// the Python package writes, and load_state_dict(load_file(path)) reads what they write.
#ifndef EXAMPLES_TRAIN_SAFETENSORS_H_
#define EXAMPLES_TRAIN_SAFETENSORS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "examples/train/checkpoint.h"

namespace examples {

// Replaces `file` as a whole, or does not change it. For each "X.running_var" it also writes PyTorch's
// "X.num_batches_tracked", with the value `batches`.
absl::Status SaveSafetensors(AtomicFile& file, absl::Span<const Tensor> tensors, int64_t batches);

// Fills `tensors`. The file must contain each of them as float32 with the same shape, and no others except
// "num_batches_tracked". On failure no tensor has changed; the error names the file or tensor, what is wrong and the
// remedy, in one line.
absl::Status LoadSafetensors(const std::string& path, absl::Span<const Tensor> tensors);

// Like LoadSafetensors, on the bytes of a file. Accepts any input safely. Errors do not name the file.
absl::Status DecodeSafetensors(absl::Span<const uint8_t> file, absl::Span<const Tensor> tensors);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_SAFETENSORS_H_
