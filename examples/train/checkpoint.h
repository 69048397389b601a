// Checkpoints: everything needed to go on training from the exact step.
//
// The file, little-endian:
//   8 bytes   "DDPCKPT\n"
//   4 bytes   version, 2
//   4 bytes   length of the header
//   header    JSON: {"optimizer": "sgd", "progress": {"step": 24, "lr": 0.05, ...},
//                    "tensors": [{"name": "1.weight", "shape": [1024, 784]}, ...]}
//   tensors   float32, one after the other in the header's order
//   32 bytes  SHA-256 of all that comes before
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

// How far the training has come, and by which numbers it goes on. Numbers alone, so that ranks can broadcast it. The
// order of samples follows from seed, epoch and epoch_samples: no other random numbers are drawn.
struct Progress {
  int64_t step = 0;           // made so far
  int64_t epoch = 0;          // completed
  int64_t epoch_samples = 0;  // of the current epoch's order, consumed by all ranks together
  int64_t seed = 0;           // of the order (and of the initial parameters), as uint64_t
  int64_t train_samples = 0;  // in the data set
  int64_t optimizer_steps = 0;
  int64_t drop_last = 0;   // 1: an epoch leaves out the samples that do not fill its last batch
  int64_t loss_steps = 0;  // of the current epoch so far, counted on each rank
  double loss_sum = 0;     // of those steps
  double lr = 0;           // before the schedule
  double momentum = 0;
  double weight_decay = 0;
  // Of the gradient scaler. A file of a training without one (0) does not name them.
  double loss_scale = 0;
  int64_t growth_tracker = 0;

  friend bool operator==(const Progress&, const Progress&) = default;
};
static_assert(std::is_trivially_copyable_v<Progress>);

// A tensor to be saved, or to be filled. Borrowed.
struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  absl::Span<float> data;
};

// Replaces `path` as a whole or leaves it as it was: see AtomicFile. One rank calls it.
absl::Status SaveCheckpoint(const std::string& path, const std::string& optimizer, const Progress& progress,
                            absl::Span<const Tensor> tensors);

// Fills `tensors`, which must be the file's: the same names and shapes in the same order, and the same optimizer. On
// failure no tensor has been touched, and the error says in one line what is wrong with which file or tensor, and the
// remedy.
absl::StatusOr<Progress> LoadCheckpoint(const std::string& path, const std::string& optimizer,
                                        absl::Span<const Tensor> tensors);

// LoadCheckpoint on the bytes of a file: a pure function that any input is safe for. Errors do not name the file.
absl::StatusOr<Progress> DecodeCheckpoint(absl::Span<const uint8_t> file, const std::string& optimizer,
                                          absl::Span<const Tensor> tensors);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_CHECKPOINT_H_
