// SPDX-License-Identifier: Apache-2.0
// The main function of the example trainers.
#ifndef EXAMPLES_TRAIN_TRAIN_MAIN_H_
#define EXAMPLES_TRAIN_TRAIN_MAIN_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "examples/data/dataset.h"
#include "examples/nn/model.h"

namespace examples {

// What to train, as one trainer's own flags say.
struct ModelChoice {
  std::string description;  // "hidden layers of 1024, 1024"; all ranks must have the same
  // The images that the model is made for: those of --synthetic, and the size to which JPEG files are scaled.
  int channels = 1;
  int height = 28;
  int width = 28;
  int classes = 10;
  bool sync_bn = false;  // synchronise its batch normalisation over the ranks
  // InvalidArgument where the model cannot be made for images of this size. May be null.
  std::function<absl::Status(const Dataset& data)> check;
  std::function<std::unique_ptr<nn::Model>(const Dataset& data, int max_batch, nn::Device& device)> make;
};

// One trainer.
struct Program {
  absl::string_view name;                         // "train_mlp"
  absl::string_view introduction;                 // what --help begins with
  absl::Span<const absl::string_view> own_flags;  // Abseil flags beside the common ones
  // Called after the flags were parsed. InvalidArgument names the flag and what is allowed.
  std::function<absl::StatusOr<ModelChoice>()> read_own_flags;
};

// The exit code after SIGTERM, SIGUSR1 or SIGINT on any rank: all ranks have stopped after the same step, and the
// checkpoint of --save, if that is given, is written. sysexits.h calls it EX_TEMPFAIL: what was asked for is not done,
// and may be by trying again.
inline constexpr int kStoppedBySignal = 75;
// The exit code after a flag that does not exist or cannot have its value.
inline constexpr int kWrongFlags = 2;

// Parses the flags, meets the other ranks, trains, and reports. An error is one line on standard error, said once by
// rank 0 where all ranks have the same. Returns the process's exit code: 0 when the training is complete,
// kStoppedBySignal, kWrongFlags, or 1 after another error; not 0 on every rank when one has failed.
int TrainMain(int argc, char** argv, const Program& program);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_TRAIN_MAIN_H_
