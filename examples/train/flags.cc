// SPDX-License-Identifier: Apache-2.0
#include "examples/train/flags.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "examples/nn/cnn.h"

ABSL_FLAG(std::string, data, "digits",
          "a folder with MNIST's four IDX files, plain or .gz, with CIFAR-10's six binary files, or with JPEG files in "
          "train/CLASS/ and val/CLASS/; \"digits\": the 1,797 built-in images");
ABSL_FLAG(bool, synthetic, false,
          "instead of --data: random images of the size that the model expects, to measure speed");
ABSL_FLAG(bool, augment, false,
          "add a black border to training images and crop them at random places; mirror a random half of photographs");
ABSL_FLAG(std::optional<int64_t>, epochs, std::nullopt,
          "passes over the training data, including those before --resume; 3 unless --steps is given");
ABSL_FLAG(int64_t, steps, 0, "stop after this many steps, including those before --resume; 0: no limit");
ABSL_FLAG(int, batch, 64, "samples per batch on each rank");
ABSL_FLAG(int, accumulate, 1, "batches per step: their gradients are added up and reduced once");
ABSL_FLAG(bool, drop_last, false,
          "drop an incomplete last batch of an epoch, instead of filling it from the start of the epoch");
ABSL_FLAG(std::string, optimizer, "sgd",
          "sgd, adam or adamw (adam with weight decay applied separately from the gradient)");
ABSL_FLAG(std::optional<double>, lr, std::nullopt,
          "learning rate; default: that of the checkpoint, else 0.05 with sgd, 0.001 with adam and adamw");
ABSL_FLAG(bool, lr_scale, false,
          "multiply the learning rate by the number of ranks, because their common batch grows with it");
ABSL_FLAG(std::string, schedule, "constant",
          "learning rate schedule: constant, cosine (half a cosine wave that would reach 0 in the step after the "
          "last), step (see --lr_step)");
ABSL_FLAG(int64_t, lr_warmup, 0, "number of steps at the start in which the learning rate grows to its full value");
ABSL_FLAG(int64_t, lr_step, 30,
          "with --schedule=step: multiply the learning rate by --lr_gamma after every this many epochs");
ABSL_FLAG(double, lr_gamma, 0.1, "see --lr_step");
ABSL_FLAG(double, momentum, 0.9, "momentum of sgd");
ABSL_FLAG(double, weight_decay, 0,
          "weight decay: sgd and adam add this times the parameter to its gradient; adamw applies it separately");
ABSL_FLAG(double, clip_norm, 0, "scale gradients down if their norm is above this; 0: never");
ABSL_FLAG(
    std::string, amp, "off",
    "mixed precision: off; bf16; on GPUs also fp16. On GPUs activations then have 16 bits. On the CPU layers round the "
    "inputs of products. Parameters, sums and reduced gradients stay in float32");
ABSL_FLAG(bool, grad_scaler, false,
          "scale the loss like torch.amp.GradScaler. A step whose gradients are not finite is then skipped; otherwise "
          "it ends the training. --amp=fp16 always does this");
ABSL_FLAG(double, label_smoothing, 0, "part of each target that is spread over all classes");
ABSL_FLAG(uint64_t, seed, 1, "random seed of the initial parameters and of the order of samples");
ABSL_FLAG(int, threads, 1, "threads that compute, on each rank");
ABSL_FLAG(int, loader_threads, 1, "threads that decode JPEG files during the steps, on each rank");
ABSL_FLAG(std::string, device, "cpu", "cpu, or cuda: each rank uses the GPU with the number of its local rank");
ABSL_FLAG(bool, tf32, false,
          "with --device=cuda: round the inputs of matrix products and convolutions to TensorFloat-32");
ABSL_FLAG(
    bool, cuda_graph, false,
    "with --device=cuda: capture a step, from the forward pass to the optimizer, into a CUDA graph, and replay it. "
    "The results are the same; small models train faster. Where it cannot be, the trainer says why and goes on "
    "without");
ABSL_FLAG(std::string, plan_cache, "auto",
          "with --device=cuda: the file that remembers which of cuDNN's ways was the fastest for each convolution, so "
          "that the next start need not try them; auto: a file in the user's cache; off: try them at each start");
ABSL_FLAG(std::string, backend, "auto", "auto (on GPUs: what works), nccl (GPUs), hierarchical, local (one rank)");
ABSL_FLAG(bool, fresh_probe, false, "auto on GPUs checks NCCL again, whatever an earlier start has found");
ABSL_FLAG(std::optional<double>, bucket_mb, std::nullopt,
          "size of a bucket of gradients in MiB; default: 25; 0: measured when the program starts");
ABSL_FLAG(bool, no_ddp, false, "train on one rank without DistributedDataParallel, to measure its cost");
ABSL_FLAG(std::string, reduce, "overlap",
          "how gradients are averaged over the ranks: overlap (in buckets, while the backward pass continues); to "
          "measure what that gains: end (all at once, after the backward pass), each (every parameter alone), gather "
          "(rank 0 gathers and broadcasts all, as DataParallel does), none (ranks then train independently)");
ABSL_FLAG(
    std::string, compress, "off",
    "what gradients are rounded to while they travel between ranks: off; bf16 or fp16 (half of the bytes); int8 or "
    "fp8 (a quarter: blocks of 128 with a scale each)");
ABSL_FLAG(bool, deterministic, false,
          "the same command gives the same bits: never change the bucket plan, and check after each epoch that all "
          "ranks have the same parameters");
ABSL_FLAG(
    bool, recover, false,
    "when NCCL, an operation or another rank fails, go on with all ranks that are left, from the last step that all "
    "of them have completed: through host memory if NCCL has failed. A rank that has died ends the training under "
    "mpirun and torchrun");
ABSL_FLAG(std::string, save, "", "write this checkpoint after each epoch, at the end, and when a signal asks to stop");
ABSL_FLAG(int64_t, save_every, 0, "also write the checkpoint of --save after every this many steps; 0: do not");
ABSL_FLAG(std::string, resume, "", "continue from this checkpoint; use the same other flags as when it was saved");
ABSL_FLAG(
    std::string, init_weights, "",
    "safetensors file with the initial weights, named as in PyTorch's state_dict; default: random weights from --seed");
ABSL_FLAG(std::string, export_weights, "", "write the weights to this safetensors file when the training is complete");
ABSL_FLAG(int64_t, warmup, 20, "number of steps at the start of this run that are not timed");
ABSL_FLAG(std::string, trace, "",
          "write a timeline of all ranks to this file, for Perfetto (https://ui.perfetto.dev) or chrome://tracing");
ABSL_FLAG(std::string, summary_json, "", "write the results to this file, as JSON");
ABSL_FLAG(bool, monitor, false,
          "show every second the power, load, clock and memory of rank 0's GPU and the power of its host's processors, "
          "as far as NVML and RAPL tell; where the output is no terminal, every 10 seconds");
ABSL_FLAG(bool, environment, false,
          "instead of training, print as JSON what figures depend on: machine, libraries, build, launcher, variables. "
          "Checkpoints and --summary_json contain the same");

namespace examples {
namespace {

// In the order of --help.
constexpr absl::string_view kCommonFlags[] = {
    "data",           "synthetic",    "augment",    "epochs",          "steps",
    "batch",          "accumulate",   "drop_last",  "optimizer",       "lr",
    "lr_scale",       "schedule",     "lr_warmup",  "lr_step",         "lr_gamma",
    "momentum",       "weight_decay", "clip_norm",  "label_smoothing", "amp",
    "grad_scaler",    "seed",         "threads",    "loader_threads",  "device",
    "tf32",           "cuda_graph",   "plan_cache", "backend",         "fresh_probe",
    "bucket_mb",      "no_ddp",       "reduce",     "compress",        "deterministic",
    "recover",        "save",         "save_every", "resume",          "init_weights",
    "export_weights", "warmup",       "trace",      "summary_json",    "monitor",
    "environment"};

constexpr absl::string_view kSeeHelp = "; --help lists the flags";

std::vector<absl::string_view> AllFlags(absl::Span<const absl::string_view> own_flags) {
  std::vector<absl::string_view> names(own_flags.begin(), own_flags.end());
  names.insert(names.end(), std::begin(kCommonFlags), std::end(kCommonFlags));
  return names;
}

template <typename T>
absl::Status CheckRange(absl::string_view name, T value, T low, T high) {
  if (value >= low && value <= high) return absl::OkStatus();  // false for a NaN
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, "=", value, " is out of range: it may be ", low, " to ", high));
}

absl::Status CheckOneOf(absl::string_view name, absl::string_view value, absl::Span<const absl::string_view> allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, "=", value, " is not known: it may be ", absl::StrJoin(allowed, ", ")));
}

absl::Status Check(const TrainFlags& flags) {
  constexpr int64_t kMany = 1'000'000'000;
  for (const absl::Status& status : {
           CheckRange<int64_t>("epochs", flags.epochs, 1, kMany),
           CheckRange<int64_t>("steps", flags.steps, 0, kMany),
           CheckRange<int64_t>("warmup", flags.warmup, 0, kMany),
           CheckRange<int64_t>("save_every", flags.save_every, 0, kMany),
           CheckRange<int>("batch", flags.batch, 1, 1 << 20),
           CheckRange<int>("threads", flags.threads, 1, 1024),
           CheckRange<int>("loader_threads", flags.loader_threads, 1, 1024),
           CheckRange<double>("lr", flags.lr.value_or(0), 0, 1e6),
           CheckRange<double>("momentum", flags.momentum, 0, 1),
           CheckRange<double>("weight_decay", flags.weight_decay, 0, 1e6),
           CheckRange<double>("clip_norm", flags.clip_norm, 0, 1e9),
           CheckRange<double>("label_smoothing", flags.label_smoothing, 0, 1),
           CheckRange<int>("accumulate", flags.accumulate, 1, 1 << 16),
           CheckRange<double>("bucket_mb", flags.bucket_mb.value_or(0), 0, 1 << 20),
           CheckRange<int64_t>("lr_warmup", flags.schedule.warmup_steps, 0, kMany),
           CheckRange<int64_t>("lr_step", flags.lr_step, 1, kMany),
           CheckRange<double>("lr_gamma", flags.schedule.gamma, 0, 1),
           CheckOneOf("optimizer", flags.optimizer, {"sgd", "adam", "adamw"}),
           CheckOneOf("backend", flags.backend, {"auto", "nccl", "hierarchical", "local"}),
           CheckOneOf("device", flags.device, {"cpu", "cuda"}),
           CheckOneOf("reduce", flags.reduce, {"overlap", "end", "each", "gather", "none"}),
           CheckOneOf("compress", flags.compress, {"off", "fp16", "bf16", "int8", "fp8"}),
       }) {
    if (!status.ok()) return status;
  }
  if (absl::Status status = CheckOneOf("amp", flags.amp, {"off", "fp16", "bf16"}); !status.ok()) return status;
  if (flags.amp == "fp16" && flags.device == "cpu") {
    return absl::InvalidArgumentError(
        "--amp=fp16 is for GPUs: on the CPU it may be off, bf16; or give --device=cuda too");
  }
  if (flags.amp == "bf16" && flags.device == "cpu" && !nn::HasBfloat16()) {
    return absl::InvalidArgumentError("--amp=bf16 needs a processor with AVX-512, which this is not: leave it out");
  }
  if (flags.data.empty()) {
    return absl::InvalidArgumentError("--data has no value: write --data=FOLDER, or leave it out");
  }
  if (flags.synthetic && flags.data != "digits") {
    return absl::InvalidArgumentError("--synthetic takes no --data: leave one out");
  }
  if (!flags.init_weights.empty() && !flags.resume.empty()) {
    return absl::InvalidArgumentError("--init_weights does not go with --resume, which brings weights: leave one out");
  }
  if (flags.tf32 && flags.device != "cuda") {
    return absl::InvalidArgumentError("--tf32 is for GPUs: give --device=cuda too");
  }
  if (flags.device == "cpu" && flags.backend == "nccl") {
    return absl::InvalidArgumentError("--backend=nccl is for GPUs: give --device=cuda too");
  }
  if (flags.reduce == "none" && !flags.save.empty()) {
    return absl::InvalidArgumentError(
        "--save does not go with --reduce=none: the ranks' parameters differ; leave one out");
  }
  if (flags.recover && (flags.reduce == "none" || flags.reduce == "gather")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--recover does not go with --reduce=", flags.reduce, "; leave one out"));
  }
  if (flags.recover && flags.device == "cuda" && flags.grad_scaler) {
    return absl::InvalidArgumentError(
        "--recover does not go with a gradient scaler (--amp=fp16, --grad_scaler) on GPUs, where a skipped step cannot "
        "be told from one that a failure has stopped: leave one out, or give --amp=bf16");
  }
  if (flags.reduce != "overlap" && flags.bucket_mb.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--bucket_mb does not go with --reduce=", flags.reduce, ", which has no buckets; leave one out"));
  }
  if (flags.compress != "off" && (flags.reduce == "gather" || flags.reduce == "none" || flags.no_ddp)) {
    return absl::InvalidArgumentError(absl::StrCat("--compress does not go with --",
                                                   flags.no_ddp ? "no_ddp" : absl::StrCat("reduce=", flags.reduce),
                                                   ", which does not reduce in buckets; leave one out"));
  }
  if (flags.save_every > 0 && flags.save.empty()) {
    return absl::InvalidArgumentError("--save_every says how often, but not where: give --save=FILE too");
  }
  return absl::OkStatus();
}

absl::StatusOr<Schedule::Kind> ReadScheduleKind(const std::string& name) {
  if (absl::Status status = CheckOneOf("schedule", name, {"constant", "cosine", "step"}); !status.ok()) return status;
  if (name == "cosine") return Schedule::Kind::kCosine;
  return name == "step" ? Schedule::Kind::kStep : Schedule::Kind::kConstant;
}

// What a flag's values look like; any text is good for one that is a string.
absl::string_view KindOf(const absl::CommandLineFlag& flag) {
  if (flag.IsOfType<bool>()) return "true or false";
  if (flag.IsOfType<double>() || flag.IsOfType<std::optional<double>>()) return "a number";
  return "a whole number in range";
}

// `text` in lines of at most `width` characters.
std::vector<std::string> Wrap(absl::string_view text, size_t width) {
  std::vector<std::string> lines(1);
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > width) lines.emplace_back();
    absl::StrAppend(&lines.back(), lines.back().empty() ? "" : " ", word);
  }
  return lines;
}

}  // namespace

double DefaultLr(absl::string_view optimizer) { return optimizer == "sgd" ? 0.05 : 0.001; }

absl::StatusOr<TrainFlags> ReadTrainFlags() {
  TrainFlags flags;
  flags.data = absl::GetFlag(FLAGS_data);
  flags.synthetic = absl::GetFlag(FLAGS_synthetic);
  flags.augment = absl::GetFlag(FLAGS_augment);
  flags.accumulate = absl::GetFlag(FLAGS_accumulate);
  flags.steps = absl::GetFlag(FLAGS_steps);
  flags.epochs = absl::GetFlag(FLAGS_epochs).value_or(flags.steps > 0 ? flags.steps : 3);
  flags.batch = absl::GetFlag(FLAGS_batch);
  flags.drop_last = absl::GetFlag(FLAGS_drop_last);
  flags.optimizer = absl::GetFlag(FLAGS_optimizer);
  flags.lr = absl::GetFlag(FLAGS_lr);
  flags.lr_scale = absl::GetFlag(FLAGS_lr_scale);
  absl::StatusOr<Schedule::Kind> kind = ReadScheduleKind(absl::GetFlag(FLAGS_schedule));
  if (!kind.ok()) return kind.status();
  flags.schedule = {.kind = *kind,
                    .warmup_steps = absl::GetFlag(FLAGS_lr_warmup),
                    .total_steps = 0,
                    .step_size = 1,
                    .gamma = absl::GetFlag(FLAGS_lr_gamma)};
  flags.lr_step = absl::GetFlag(FLAGS_lr_step);
  flags.clip_norm = absl::GetFlag(FLAGS_clip_norm);
  flags.amp = absl::GetFlag(FLAGS_amp);
  flags.grad_scaler = absl::GetFlag(FLAGS_grad_scaler) || flags.amp == "fp16";
  flags.label_smoothing = absl::GetFlag(FLAGS_label_smoothing);
  flags.bucket_mb = absl::GetFlag(FLAGS_bucket_mb);
  flags.momentum = absl::GetFlag(FLAGS_momentum);
  flags.weight_decay = absl::GetFlag(FLAGS_weight_decay);
  flags.seed = absl::GetFlag(FLAGS_seed);
  flags.threads = absl::GetFlag(FLAGS_threads);
  flags.loader_threads = absl::GetFlag(FLAGS_loader_threads);
  flags.device = absl::GetFlag(FLAGS_device);
  flags.tf32 = absl::GetFlag(FLAGS_tf32);
  flags.cuda_graph = absl::GetFlag(FLAGS_cuda_graph);
  flags.plan_cache = absl::GetFlag(FLAGS_plan_cache);
  flags.backend = absl::GetFlag(FLAGS_backend);
  flags.fresh_probe = absl::GetFlag(FLAGS_fresh_probe);
  flags.no_ddp = absl::GetFlag(FLAGS_no_ddp);
  flags.reduce = absl::GetFlag(FLAGS_reduce);
  flags.compress = absl::GetFlag(FLAGS_compress);
  flags.deterministic = absl::GetFlag(FLAGS_deterministic);
  flags.recover = absl::GetFlag(FLAGS_recover);
  flags.save = absl::GetFlag(FLAGS_save);
  flags.save_every = absl::GetFlag(FLAGS_save_every);
  flags.resume = absl::GetFlag(FLAGS_resume);
  flags.init_weights = absl::GetFlag(FLAGS_init_weights);
  flags.export_weights = absl::GetFlag(FLAGS_export_weights);
  flags.warmup = absl::GetFlag(FLAGS_warmup);
  flags.trace = absl::GetFlag(FLAGS_trace);
  flags.summary_json = absl::GetFlag(FLAGS_summary_json);
  flags.monitor = absl::GetFlag(FLAGS_monitor);
  flags.environment = absl::GetFlag(FLAGS_environment);
  if (absl::Status status = Check(flags); !status.ok()) return status;
  return flags;
}

absl::StatusOr<bool> ParseArguments(absl::Span<char* const> argv, absl::Span<const absl::string_view> own_flags) {
  const std::vector<absl::string_view> known = AllFlags(own_flags);
  bool help = false;
  for (size_t i = 1; i < argv.size(); ++i) {
    const absl::string_view argument = argv[i];
    absl::string_view rest = argument;
    if (argument == "-h" || argument == "--help") {
      help = true;
      continue;
    }
    if (!absl::ConsumePrefix(&rest, "--")) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", argument, "\" is not a flag: flags begin with --", kSeeHelp));
    }
    const std::vector<std::string> parts = absl::StrSplit(rest, absl::MaxSplits('=', 1));
    const std::string name = absl::StrReplaceAll(parts[0], {{"-", "_"}});
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag --", parts[0], kSeeHelp));
    }
    absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    std::string value;
    if (parts.size() == 2) {
      value = parts[1];
    } else if (flag->IsOfType<bool>()) {
      value = "true";
    } else if (i + 1 < argv.size()) {
      value = argv[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat("--", parts[0], " has no value: write --", parts[0], "=VALUE"));
    }
    std::string error;
    if (!flag->ParseFrom(value, &error)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", parts[0], "=", value, " is not ", KindOf(*flag), ": ", flag->Help()));
    }
  }
  return help;
}

std::string HelpText(absl::string_view introduction, absl::Span<const absl::string_view> own_flags) {
  std::string text = absl::StrCat(introduction, "\nFlags (with their defaults):\n");
  for (const absl::string_view name : AllFlags(own_flags)) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    const std::string usage = absl::StrCat("--", name, "=", flag->DefaultValue());
    const std::vector<std::string> lines = Wrap(flag->Help(), 82);
    absl::StrAppendFormat(&text, "  %-24s  %s\n", usage, lines.front());
    for (size_t i = 1; i < lines.size(); ++i) absl::StrAppendFormat(&text, "  %-24s  %s\n", "", lines[i]);
  }
  return text;
}

}  // namespace examples
