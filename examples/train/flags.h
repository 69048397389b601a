// SPDX-License-Identifier: Apache-2.0
// The flags that all example trainers share, and a parser with helpful errors.
//
// The flags are Abseil flags. The parser is not Abseil's: absl::ParseCommandLine ends the process itself, on every rank
// and with several lines of output, and does not accept dashes within a name. Here --no-ddp is the same as --no_ddp.
#ifndef EXAMPLES_TRAIN_FLAGS_H_
#define EXAMPLES_TRAIN_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "examples/train/schedule.h"

namespace examples {

// The checked values, with defaults filled in.
struct TrainFlags {
  std::string data;
  bool synthetic = false;
  bool augment = false;
  int64_t epochs = 3;
  int64_t steps = 0;   // 0: no limit
  int batch = 64;      // per rank and micro-batch
  int accumulate = 1;  // micro-batches per step
  bool drop_last = false;
  std::string optimizer = "sgd";
  std::optional<double> lr;  // unset: the checkpoint's, else DefaultLr()
  bool lr_scale = false;     // multiply by the number of ranks
  Schedule schedule;         // without total_steps and step_size, which depend on the data
  int64_t lr_step = 30;      // epochs
  double momentum = 0.9;
  double weight_decay = 0;
  double clip_norm = 0;  // 0: gradients are not clipped
  double label_smoothing = 0;
  std::string amp = "off";   // fp16, bf16
  bool grad_scaler = false;  // always with fp16
  uint64_t seed = 1;
  int threads = 1;
  int loader_threads = 1;
  std::string device = "cpu";
  bool tf32 = false;
  bool cuda_graph = false;
  std::string plan_cache = "auto";  // off, or a file
  std::string backend = "auto";
  bool fresh_probe = false;
  std::optional<double> bucket_mb;  // unset: the library's default; 0: the library measures it
  bool no_ddp = false;
  std::string reduce = "overlap";  // end, each, gather, none
  std::string compress = "off";    // fp16, bf16, int8, fp8
  bool deterministic = false;
  bool sync_bn = false;  // batch normalisation over all ranks; a flag of train_cnn
  bool recover = false;
  std::string save;
  int64_t save_every = 0;  // steps; 0: only at the end of each epoch
  std::string resume;
  std::string init_weights;
  std::string export_weights;
  int64_t warmup = 20;
  std::string trace;
  std::string summary_json;
  bool monitor = false;
  bool environment = false;
};

// Returns the default learning rate of an optimizer.
double DefaultLr(absl::string_view optimizer);

// Returns the values of the flags after ParseArguments. InvalidArgument names the flag, its value and the legal values.
absl::StatusOr<TrainFlags> ReadTrainFlags();

// Sets the flags from the command line: --name=value, --name value, and --name for a bool. A dash within a name is the
// same as an underscore. Accepts only `own_flags` and the common flags. InvalidArgument names the argument and the
// remedy. Returns true if --help is among the arguments.
absl::StatusOr<bool> ParseArguments(absl::Span<char* const> argv, absl::Span<const absl::string_view> own_flags);

// Returns the text of --help: `introduction`, then each flag with its default and meaning, `own_flags` first.
std::string HelpText(absl::string_view introduction, absl::Span<const absl::string_view> own_flags);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_FLAGS_H_
