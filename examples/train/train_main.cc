// SPDX-License-Identifier: Apache-2.0
#include "examples/train/train_main.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "ddp/collectives.h"
#include "ddp/context.h"
#include "examples/data/dataset.h"
#include "examples/data/file.h"
#include "examples/nn/onednn.h"
#include "examples/nn/plan_cache.h"
#include "examples/nn/queues.h"
#include "examples/train/agreement.h"
#include "examples/train/console.h"
#include "examples/train/energy.h"
#include "examples/train/environment.h"
#include "examples/train/flags.h"
#include "examples/train/host.h"
#include "examples/train/summary.h"
#include "examples/train/trainer.h"

namespace examples {
namespace {

struct Settings {
  bool help = false;
  TrainFlags flags;
  ModelChoice model;
};

// A file as all its spellings and links name it, whether it exists or not.
std::string SameName(const std::string& path) {
  std::error_code none;
  return std::filesystem::weakly_canonical(std::filesystem::absolute(FollowLinks(path), none), none).string();
}

absl::Status CheckOutputs(const TrainFlags& flags) {
  const std::pair<absl::string_view, const std::string&> files[] = {{"--save=", flags.save},
                                                                    {"--export_weights=", flags.export_weights},
                                                                    {"--summary_json=", flags.summary_json},
                                                                    {"--trace=", flags.trace}};
  for (const auto& one : files) {
    for (const auto* other = files; other != &one; ++other) {
      if (one.second.empty() || other->second.empty() || SameName(one.second) != SameName(other->second)) continue;
      return absl::InvalidArgumentError(absl::StrCat(other->first, other->second, " and ", one.first, one.second,
                                                     " name the same file; give each a file of its own"));
    }
  }
  std::error_code none;
  if (!std::filesystem::exists(flags.trace, none) || std::filesystem::is_regular_file(flags.trace, none)) {
    return absl::OkStatus();
  }
  // Every rank writes a part beside it.
  return absl::InvalidArgumentError(
      absl::StrCat("--trace=", flags.trace, " exists and is not a regular file; give a file in a folder"));
}

absl::StatusOr<Settings> ReadSettings(absl::Span<char* const> argv, const Program& program) {
  Settings settings;
  const absl::StatusOr<bool> help = ParseArguments(argv, program.own_flags);
  if (!help.ok()) return help.status();
  settings.help = *help;
  if (settings.help) return settings;
  absl::StatusOr<TrainFlags> flags = ReadTrainFlags();
  if (!flags.ok()) return flags.status();
  settings.flags = *std::move(flags);
  if (absl::Status status = CheckOutputs(settings.flags); !status.ok()) return status;
  absl::StatusOr<ModelChoice> model = program.read_own_flags();
  if (!model.ok()) return model.status();
  settings.model = *std::move(model);
  settings.flags.sync_bn = settings.model.sync_bn;
  if (settings.flags.recover && settings.flags.sync_bn) {
    return absl::InvalidArgumentError(
        "--recover does not go with --sync_bn, which exchanges in a group of its own; leave one out");
  }
  return settings;
}

std::string Given(const std::optional<double>& flag) { return flag.has_value() ? ExactText(*flag) : "(not given)"; }

// Everything that must be equal on all ranks for them to train one model, one item a line.
std::string Fingerprint(const Settings& settings) {
  const TrainFlags& f = settings.flags;
  return absl::StrCat(settings.model.description, "\n--epochs=", f.epochs, "\n--steps=", f.steps, "\n--batch=", f.batch,
                      "\n--accumulate=", f.accumulate, "\n--augment=", f.augment, "\n--drop_last=", f.drop_last,
                      "\n--optimizer=", f.optimizer, "\n--lr=", Given(f.lr), "\n--lr_scale=", f.lr_scale,
                      "\n--schedule=", static_cast<int>(f.schedule.kind), "\n--lr_warmup=", f.schedule.warmup_steps,
                      "\n--lr_step=", f.lr_step, "\n--lr_gamma=", ExactText(f.schedule.gamma),
                      "\n--momentum=", ExactText(f.momentum), "\n--weight_decay=", ExactText(f.weight_decay),
                      "\n--clip_norm=", ExactText(f.clip_norm), "\n--label_smoothing=", ExactText(f.label_smoothing),
                      "\n--amp=", f.amp, "\n--grad_scaler=", f.grad_scaler, "\n--bucket_mb=", Given(f.bucket_mb),
                      "\n--seed=", f.seed, "\n--device=", f.device, "\n--tf32=", f.tf32, "\n--no_ddp=", f.no_ddp,
                      "\n--reduce=", f.reduce, "\n--compress=", f.compress, "\n--deterministic=", f.deterministic,
                      "\n--sync_bn=", f.sync_bn, "\n--recover=", f.recover, "\n--save=", f.save,
                      "\n--save_every=", f.save_every, "\n--resume=", f.resume, "\n--init_weights=", f.init_weights,
                      "\n--export_weights=", f.export_weights);
}

std::string DataText(const Dataset& data) {
  return absl::StrCat(data.train.count(), " training and ", data.test.count(), " test images of ", data.height, "x",
                      data.width, data.channels == 1 ? "" : absl::StrCat(" in ", data.channels, " channels"));
}

// Ranks, threads and where they run. Collective.
absl::StatusOr<std::string> WorldText(ddp::Context& context, const TrainFlags& flags) {
  const absl::StatusOr<std::vector<std::string>> cores = ddp::GatherStrings(context.world(), BoundCores());
  if (!cores.ok()) return cores.status();
  const int ranks = context.world_size();
  std::string text = absl::StrCat(
      ranks, ranks == 1 ? " rank" : " ranks", ranks == 1 ? "" : absl::StrCat(" started by ", context.launcher()), ", ",
      flags.threads, flags.threads == 1 ? " thread" : " threads", ranks == 1 ? "" : " each",
      flags.device == "cuda" ? ", a GPU" : "", flags.device == "cuda" && ranks > 1 ? " each" : "", ", backend ",
      context.world().backend(), "; cores:");
  for (size_t rank = 0; rank < cores->size(); ++rank) {
    absl::StrAppend(&text, rank == 0 ? " " : "; ", "rank ", rank, " on ", (*cores)[rank]);
  }
  return text;
}

absl::Status CheckSummaryPath(const std::string& path) {
  struct stat file;
  const bool is_folder = stat(path.c_str(), &file) == 0 && S_ISDIR(file.st_mode);
  if (path.empty() || (access(path.c_str(), W_OK) == 0 && !is_folder)) return absl::OkStatus();
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (access(path.c_str(), F_OK) != 0 && access(folder.c_str(), W_OK) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("cannot write --summary_json=", path,
                                                 ": give a file in a folder that exists and can be written to"));
}

std::string PlanFile(const std::string& flag) {
  return flag == "auto" ? nn::FileInCache("cudnn-plans") : flag == "off" ? "" : flag;
}

// Collective.
absl::StatusOr<std::unique_ptr<nn::Device>> OpenGpu(ddp::Context& context, const TrainFlags& flags) {
  const std::string mine = absl::StrCat(HostName(), " ", GpuBusId(context.device().index));
  const absl::StatusOr<std::vector<std::string>> gpus = ddp::GatherStrings(context.world(), mine);
  if (!gpus.ok()) return gpus.status();
  const nn::CudaOptions options = {.tf32 = flags.tf32,
                                   .activations = flags.amp == "fp16"   ? nn::Element::kFloat16
                                                  : flags.amp == "bf16" ? nn::Element::kBFloat16
                                                                        : nn::Element::kFloat32,
                                   .deterministic = flags.deterministic,
                                   .plan_file = PlanFile(flags.plan_cache),
                                   .shared = std::count(gpus->begin(), gpus->end(), mine) > 1};
  try {
    return nn::OpenCuda(context.device().index, options);
  } catch (const nn::DeviceError& e) {
    return absl::FailedPreconditionError(e.what());
  }
}

std::string EnvironmentOf(const ddp::Context& context, const TrainFlags& flags) {
  EnvironmentSources sources = ThisProcess();
  sources.libraries = {{"onednn", nn::onednn::Version()}};
  return DescribeEnvironment(std::string(context.launcher()), flags.device == "cuda", sources);
}

absl::Status Train(ddp::Context& context, const Program& program, const Settings& settings) {
  ddp::ProcessGroup& group = context.world();
  const TrainFlags& flags = settings.flags;
  Console console(group.rank() == 0, OutputIsTerminal(context.launcher() == "mpirun"));
  if (absl::Status status = RequireSame(group, Fingerprint(settings), "give all ranks the same flags"); !status.ok()) {
    return status;
  }
  const ModelChoice& choice = settings.model;
  const absl::StatusOr<Dataset> data =
      flags.synthetic ? SyntheticImages(choice.channels, choice.height, choice.width, choice.classes)
                      : LoadDataset(flags.data, {choice.channels, choice.height, choice.width});
  absl::Status status = data.status();
  if (status.ok() && choice.check != nullptr) status = choice.check(*data);
  if (status.ok() && group.rank() == 0) status = CheckSummaryPath(flags.summary_json);
  if (status = AgreeOn(group, status); !status.ok()) return status;
  if (status = RequireSame(group, DataText(*data), "give all ranks the same --data"); !status.ok()) {
    return status;
  }
  const absl::StatusOr<std::string> world = WorldText(context, flags);
  if (!world.ok()) return world.status();
  const std::string& choice_text = context.backend_choice().text;
  console.Print(absl::StrCat(program.name, ": ", *world, choice_text.empty() ? "" : "\n", choice_text,
                             "\ndata: ", data->name, ", ", DataText(*data), "\n"));

  nn::SetThreads(flags.threads);
  std::unique_ptr<nn::Device> gpu;
  if (flags.device == "cuda") {
    absl::StatusOr<std::unique_ptr<nn::Device>> opened = OpenGpu(context, flags);
    if (status = AgreeOn(group, opened.status()); !status.ok()) return status;
    gpu = *std::move(opened);
  }
  const std::unique_ptr<nn::Model> model = choice.make(*data, flags.batch, gpu != nullptr ? *gpu : nn::Cpu());
  const bool keeps_environment = group.rank() == 0 && !(flags.save.empty() && flags.summary_json.empty());
  EnergySources sources;
  sources.gpu = gpu != nullptr;
  if (sources.gpu) sources.bus_id = GpuBusId(context.device().index);
  EnergyMeter energy(sources);
  if (flags.monitor && !energy.WhyNot().empty()) {
    console.Print(absl::StrCat("--monitor has nothing to show: ", energy.WhyNot(), "\n"));
  }
  absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Create(
      group, flags, *data, *model, console, keeps_environment ? EnvironmentOf(context, flags) : "", &energy, &context);
  if (!trainer.ok()) return trainer.status();
  console.Print(absl::StrCat("model: ", choice.description, "; ", (*trainer)->Plan(), "\n"));
  const absl::StatusOr<Summary> summary = (*trainer)->Run();
  if (!summary.ok()) return summary.status();
  console.Print(ToText(*summary));
  ddp::ProcessGroup& last = context.world();  // another one, after a recovery
  if (last.rank() == 0 && !flags.summary_json.empty()) status = WriteJson(*summary, flags.summary_json);
  return AgreeOn(last, status);
}

void PrintError(const Program& program, absl::string_view who, const absl::Status& error) {
  const std::string line =
      absl::StrCat(program.name, ": ", who, absl::StrReplaceAll(error.message(), {{"\n", " "}}), "\n");
  std::fputs(line.c_str(), stderr);
}

}  // namespace

// The world is created even where the flags are wrong: only then is it known whose turn it is to complain.
int TrainMain(int argc, char** argv, const Program& program) {
  const absl::StatusOr<Settings> settings = ReadSettings(absl::MakeConstSpan(argv, static_cast<size_t>(argc)), program);
  ddp::ContextOptions options;
  if (settings.ok() && settings->flags.backend != "auto") options.backend = settings->flags.backend;
  if (settings.ok() && settings->flags.fresh_probe) options.fresh_probe = true;
  if (settings.ok() && !settings->flags.trace.empty()) options.trace = settings->flags.trace;
  // Which GPU is told by the rank's number on its host.
  if (settings.ok() && settings->flags.device == "cuda") {
    nn::AskForQueues();
    options.device = {ddp::Device::Kind::kCuda, -1};
  }
  const absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
  if (!context.ok()) {
    PrintError(program, "", settings.ok() ? context.status() : settings.status());
    return settings.ok() ? 1 : kWrongFlags;
  }
  ddp::ProcessGroup& group = (*context)->world();
  absl::Status status = AgreeOn(group, settings.status());
  if (status.ok() && settings->help) {
    const std::string text = absl::StrCat(HelpText(program.introduction, program.own_flags), "\n", kDigitsAttribution);
    if (group.rank() == 0) std::fputs(text.c_str(), stdout);
    return 0;
  }
  if (status.ok() && settings->flags.environment) {
    if (group.rank() == 0) std::puts(EnvironmentOf(**context, settings->flags).c_str());
    return 0;
  }
  if (status.ok()) {
    CatchStopSignals();
    // The trainer ends its own errors so; a model that has no room is made before there is one.
    status = EndTogether(group, [&] { return Train(**context, program, *settings); });
  }
  if (status.ok()) return 0;
  if (!IsAgreed(status)) {
    PrintError(program, group.size() > 1 ? absl::StrCat("rank ", group.rank(), ": ") : "", status);
  } else if ((*context)->world().rank() == 0) {
    PrintError(program, "", status);
  }
  if (!settings.ok()) return kWrongFlags;
  return absl::IsCancelled(status) ? kStoppedBySignal : 1;
}

}  // namespace examples
