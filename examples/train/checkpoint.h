// SPDX-License-Identifier: Apache-2.0
// Checkpoints: everything that is needed to continue a training from the exact step.
//
// The file, little-endian:
//   8 bytes   "DDPCKPT\n"
//   4 bytes   version, 2
//   4 bytes   length of the header
//   header    JSON: {"optimizer": "sgd", "progress": {"step": 24, "lr": 0.05, ...},
//                    "tensors": [{"name": "1.weight", "shape": [1024, 784]}, ...],
//                    "environment": {...}}  of the run that wrote it, see environment.h; for people only
//   tensors   float32, in the header's order
//   32 bytes  SHA-256 of everything before
#ifndef EXAMPLES_TRAIN_CHECKPOINT_H_
#define EXAMPLES_TRAIN_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace examples {

class AtomicFile;

// The progress of a training, and the numbers that it continues with. It contains only numbers, so that ranks can
// broadcast it. Seed, epoch and epoch_samples determine the order of samples; no other random numbers are drawn.
struct Progress {
  int64_t step = 0;           // steps completed
  int64_t epoch = 0;          // epochs completed
  int64_t epoch_samples = 0;  // samples of the current epoch that all ranks together have used
  int64_t seed = 0;           // random seed (a uint64_t) of the order and the initial parameters
  int64_t train_samples = 0;  // number of training samples in the data set
  int64_t optimizer_steps = 0;
  int64_t drop_last = 0;   // 1: an epoch drops the samples that do not fill its last batch
  int64_t loss_steps = 0;  // steps of the current epoch so far, summed over the ranks that made them
  double loss_sum = 0;     // sum of the losses of these steps
  double lr = 0;           // learning rate before the schedule
  double momentum = 0;
  double weight_decay = 0;
  // State of the gradient scaler. The file of a training without one (0) does not contain these numbers.
  double loss_scale = 0;
  int64_t growth_tracker = 0;

  friend bool operator==(const Progress&, const Progress&) = default;
};
static_assert(std::is_trivially_copyable_v<Progress>);

// A tensor to save or to fill. The memory is borrowed.
struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  absl::Span<float> data;
};

// Replaces `file` as a whole, or does not change it. `environment` is a JSON object, or empty.
absl::Status SaveCheckpoint(AtomicFile& file, const std::string& optimizer, const Progress& progress,
                            absl::Span<const Tensor> tensors, const std::string& environment = "");

// Fills `tensors`. Names, shapes, their order and the optimizer must be those of the file. On failure no tensor has
// changed; the error names the file or tensor, what is wrong and the remedy, in one line.
absl::StatusOr<Progress> LoadCheckpoint(const std::string& path, const std::string& optimizer,
                                        absl::Span<const Tensor> tensors);

// Like LoadCheckpoint, on the bytes of a file. Accepts any input safely. Errors do not name the file.
absl::StatusOr<Progress> DecodeCheckpoint(absl::Span<const uint8_t> file, const std::string& optimizer,
                                          absl::Span<const Tensor> tensors);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_CHECKPOINT_H_
