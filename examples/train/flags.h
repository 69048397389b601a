// The flags that all example trainers have, and a parser that teaches.
//
// Flags are Abseil's. The parser is our own because absl::ParseCommandLine ends the process by itself, on every rank
// and with several lines, and knows no dashes within a name: here --no-ddp is --no_ddp.
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

// The values, checked, with defaults filled in.
struct TrainFlags {
  std::string data;
  bool synthetic = false;
  bool augment = false;
  int64_t epochs = 3;
  int64_t steps = 0;   // 0: no limit
  int batch = 64;      // per rank and micro-batch
  int accumulate = 1;  // micro-batches in a step
  bool drop_last = false;
  std::string optimizer = "sgd";
  std::optional<double> lr;  // unset: as in the checkpoint, else DefaultLr()
  bool lr_scale = false;     // by the number of ranks
  Schedule schedule;         // but for total_steps and step_size, which depend on the data
  int64_t lr_step = 30;      // epochs
  double momentum = 0.9;
  double weight_decay = 0;
  double clip_norm = 0;  // 0: gradients are not clipped
  double label_smoothing = 0;
  std::string amp = "off";   // fp16, bf16
  bool grad_scaler = false;  // always with fp16
  uint64_t seed = 1;
  int threads = 1;
  std::string device = "cpu";
  bool tf32 = false;
  std::string backend = "auto";
  std::optional<double> bucket_mb;  // unset: the library's default; 0: it measures
  bool no_ddp = false;
  bool no_sync = false;
  bool deterministic = false;
  std::string save;
  int64_t save_every = 0;  // steps; 0: at the end of each epoch only
  std::string resume;
  std::string init_weights;
  std::string export_weights;
  int64_t warmup = 20;
  std::string trace;
  std::string summary_json;
};

// The learning rate of an optimizer that is not told one.
double DefaultLr(absl::string_view optimizer);

// The values of the flags after ParseArguments. InvalidArgument names the flag, its value and what is allowed.
absl::StatusOr<TrainFlags> ReadTrainFlags();

// Sets the flags from the command line: --name=value, --name value, and for a bool --name; a dash within a name counts
// as an underscore. Only `own_flags` and the trainers' common ones are accepted. InvalidArgument names the argument and
// the remedy. Returns true if --help is among the arguments.
absl::StatusOr<bool> ParseArguments(absl::Span<char* const> argv, absl::Span<const absl::string_view> own_flags);

// What --help prints: `introduction`, then every flag with its default and meaning, `own_flags` first.
std::string HelpText(absl::string_view introduction, absl::Span<const absl::string_view> own_flags);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_FLAGS_H_
