// SPDX-License-Identifier: Apache-2.0
// How a Trainer begins, resumes and saves.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/comm_hook.h"
#include "examples/data/file.h"
#include "examples/train/agreement.h"
#include "examples/train/safetensors.h"
#include "examples/train/trainer.h"

namespace examples {
namespace {

// Without its learning rate.
std::unique_ptr<nn::Optimizer> MakeOptimizer(const TrainFlags& flags, nn::Device& device, size_t count) {
  if (flags.optimizer != "sgd") {
    return device.MakeAdam(count, {.weight_decay = flags.weight_decay, .decoupled = flags.optimizer == "adamw"});
  }
  return device.MakeSgd(count, {.momentum = flags.momentum, .weight_decay = flags.weight_decay});
}

std::shared_ptr<ddp::CommHook> HookFor(const std::string& compress) {
  if (compress == "fp16") return ddp::CreateCompressionHook(ddp::DType::kFloat16);
  if (compress == "bf16") return ddp::CreateCompressionHook(ddp::DType::kBFloat16);
  if (compress == "int8") return ddp::CreateBlockCompressionHook(ddp::BlockFormat::kInt8);
  if (compress == "fp8") return ddp::CreateBlockCompressionHook(ddp::BlockFormat::kFloat8E4M3);
  return nullptr;
}

ReplicaOptions OptionsFor(const TrainFlags& flags) {
  ReplicaOptions options;
  options.mode = flags.no_ddp               ? SyncMode::kNone
                 : flags.reduce == "none"   ? SyncMode::kNoSync
                 : flags.reduce == "end"    ? SyncMode::kEnd
                 : flags.reduce == "each"   ? SyncMode::kEach
                 : flags.reduce == "gather" ? SyncMode::kGather
                                            : SyncMode::kOverlap;
  options.replan = !flags.deterministic;
  options.hook = HookFor(flags.compress);
  if (flags.bucket_mb.has_value()) {
    options.bucket_bytes = *flags.bucket_mb == 0 ? ddp::DdpOptions::kAutoBucketBytes
                                                 : static_cast<size_t>(std::ceil(*flags.bucket_mb * (1 << 20)));
  }
  return options;
}

absl::Status Claim(absl::string_view flag, const std::string& path, absl::Duration patience, uint64_t run,
                   std::unique_ptr<AtomicFile>& file) {
  absl::StatusOr<std::unique_ptr<AtomicFile>> claimed = AtomicFile::Create(path, patience, run);
  if (claimed.ok()) file = *std::move(claimed);
  if (claimed.ok() || absl::IsFailedPrecondition(claimed.status())) return claimed.status();
  return absl::Status(claimed.status().code(),
                      absl::StrCat(claimed.status().message(), "; give ", flag, " a file that can be written"));
}

}  // namespace

absl::Status Trainer::Start() {
  if (flags_.no_ddp && group_->size() > 1) {
    return Agreed(
        absl::InvalidArgumentError("--no_ddp is for one rank; with several, --reduce=none trains without reduction"));
  }
  if (loader_->batches() == 0) {
    return Agreed(absl::InvalidArgumentError(
        absl::StrCat("--drop_last leaves nothing of ", data_.train.count(), " training images in global batches of ",
                     loader_->global_batch(), "; give a smaller --batch, or leave out --drop_last")));
  }
  absl::StatusOr<std::unique_ptr<Replica>> replica = Replica::Create(model_, *group_, OptionsFor(flags_));
  if (!replica.ok()) return replica.status();
  replica_ = *std::move(replica);
  ChooseGraphs();
  if (absl::Status status = Synchronize(); !status.ok()) return status;
  optimizer_ = MakeOptimizer(flags_, device_, replica_->values().size());
  optimizer_->set_clip_norm(flags_.clip_norm);
  optimizer_->set_words({.skip_step = replica_->skip_step()});
  progress_.seed = static_cast<int64_t>(flags_.seed);
  progress_.train_samples = static_cast<int64_t>(data_.train.count());
  progress_.drop_last = flags_.drop_last ? 1 : 0;
  progress_.lr = DefaultLr(flags_.optimizer);
  progress_.momentum = flags_.momentum;
  progress_.weight_decay = flags_.weight_decay;
  model_.Initialize(flags_.seed);
  if (absl::Status status = Resume(); !status.ok()) return status;
  if (absl::Status status = BroadcastState(); !status.ok()) return status;
  KeepBuffers();
  EndEpochIfOver();  // with --drop_last a larger batch may leave nothing of it
  if (absl::Status status = StartScaler(); !status.ok()) return status;
  if (flags_.lr.has_value()) progress_.lr = *flags_.lr;
  if (absl::Status status = ShareNotices(); !status.ok()) return status;
  PlanSteps();
  first_step_ = progress_.step;
  uncounted_steps_ = progress_.step - progress_.optimizer_steps;
  return absl::OkStatus();
}

absl::Status Trainer::Synchronize() {
  if (!flags_.sync_bn || group_->size() == 1) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<ddp::ProcessGroup>> group = group_->Split(/*color=*/0, /*key=*/group_->rank());
  if (!group.ok()) return group.status();
  sync_ = std::make_unique<nn::SyncGroup>(*std::move(group), device_);
  model_.Synchronize(sync_.get());
  replica_->Watch(sync_->group());
  return absl::OkStatus();
}

absl::Status Trainer::ShareNotices() {
  if (!Reduces()) return absl::OkStatus();
  absl::StatusOr<StepNotice> notice = StepNotice::Create(*group_);
  if (notice.ok()) notice_ = *std::move(notice);
  return notice.status();
}

absl::Status Trainer::StartScaler() {
  if (!flags_.grad_scaler) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<ddp::GradScaler>> scaler = ddp::GradScaler::Create({.device = replica_->device()});
  if (!scaler.ok()) return scaler.status();
  scaler_ = *std::move(scaler);
  scaled_optimizer_ =
      std::make_unique<FlatOptimizer>(*optimizer_, replica_->values(), replica_->mutable_grads(), replica_->device());
  if (progress_.loss_scale == 0) return absl::OkStatus();
  absl::StatusOr<ddp::GradScalerState> state = scaler_->State();
  if (!state.ok()) return state.status();
  state->scale = static_cast<float>(progress_.loss_scale);
  state->growth_tracker = static_cast<int32_t>(progress_.growth_tracker);
  return scaler_->Load(*state);
}

void Trainer::PlanSteps() {
  const auto epoch_steps = static_cast<int64_t>(loader_->batches());
  schedule_ = flags_.schedule;
  schedule_.origin = progress_.step - progress_.epoch * epoch_steps -
                     progress_.epoch_samples / static_cast<int64_t>(loader_->global_batch());
  last_step_ = schedule_.origin + flags_.epochs * epoch_steps;
  if (flags_.steps > 0) last_step_ = std::min(last_step_, flags_.steps);
  schedule_.total_steps = last_step_;
  schedule_.step_size = flags_.lr_step * epoch_steps;
}

// Rank 0 reads the checkpoint, or the weights; the others need not even see the file.
absl::Status Trainer::Resume() { return AgreeOn(*group_, group_->rank() == 0 ? Load() : absl::OkStatus()); }

absl::Status Trainer::Load() {
  if (!flags_.resume.empty()) {
    RemoveUnfinished(flags_.resume);
    const absl::StatusOr<Progress> saved = LoadCheckpoint(flags_.resume, flags_.optimizer, Tensors());
    if (!saved.ok()) return saved.status();
    Mirror(/*to_host=*/false);
    progress_ = *saved;
    if (absl::Status status = CheckResumed(); !status.ok()) return status;
    RescaleLosses();
  }
  if (!flags_.init_weights.empty()) {
    const std::vector<Tensor> weights = Weights();
    Mirror(/*to_host=*/true);  // what else is mirrored stays
    if (absl::Status status = LoadSafetensors(flags_.init_weights, weights); !status.ok()) return status;
    Mirror(/*to_host=*/false);
  }
  return ClaimFiles(absl::ZeroDuration());
}

// On rank 0, for the rest of the run: a second training that writes the same file, and a folder that cannot be written
// to, are better found now than after an epoch.
absl::Status Trainer::ClaimFiles(absl::Duration patience) {
  if (group_->rank() != 0) return absl::OkStatus();
  if (writer_ == nullptr && !flags_.save.empty()) {
    std::unique_ptr<AtomicFile> file;
    if (absl::Status status = Claim("--save", flags_.save, patience, run_, file); !status.ok()) return status;
    writer_ = std::make_unique<CheckpointWriter>(std::move(file), flags_.optimizer, summary_.environment);
  }
  if (exported_ != nullptr || flags_.export_weights.empty()) return absl::OkStatus();
  return Claim("--export_weights", flags_.export_weights, patience, run_, exported_);
}

absl::Status Trainer::CheckResumed() const {
  const auto refuse = [this](auto&&... what) {
    return absl::FailedPreconditionError(absl::StrCat("cannot resume from ", flags_.resume, ": ", what...));
  };
  const auto global_batch = static_cast<int64_t>(loader_->global_batch());
  const auto seed = static_cast<uint64_t>(progress_.seed);
  if (seed != flags_.seed) return refuse("it was saved with another seed; give --seed=", seed);
  if (progress_.train_samples != static_cast<int64_t>(data_.train.count())) {
    return refuse("it was saved from a data set of ", progress_.train_samples, " training images, this one has ",
                  data_.train.count(), "; give the same --data");
  }
  for (const auto& [flag, saved, given] :
       {std::tuple("momentum", progress_.momentum, flags_.momentum),
        std::tuple("weight_decay", progress_.weight_decay, flags_.weight_decay),
        std::tuple("drop_last", static_cast<double>(progress_.drop_last), flags_.drop_last ? 1.0 : 0.0)}) {
    if (saved != given) {
      return refuse("it was saved with --", flag, "=", saved, ", this run has --", flag, "=", given,
                    "; give what it was saved with");
    }
  }
  if (progress_.loss_scale > 0 && !flags_.grad_scaler) {
    return refuse("it was saved with a gradient scaler; give --grad_scaler");
  }
  if (progress_.epoch_samples % global_batch != 0) {
    return refuse("it was saved after ", progress_.epoch_samples, " samples of an epoch, which is no whole number of ",
                  "global batches of ", global_batch, "; give the --batch and number of ranks it was saved with");
  }
  return absl::OkStatus();
}

// Losses count by rank and step. If those of this run have another number of samples, the ones before count as many
// times as they would have here: else the mean loss of the epoch would not be that of its samples.
void Trainer::RescaleLosses() {
  if (progress_.loss_steps == 0) return;
  const auto global_batch = static_cast<int64_t>(loader_->global_batch());
  const int64_t steps = progress_.epoch_samples / global_batch * group_->size();
  progress_.loss_sum *= static_cast<double>(steps) / static_cast<double>(progress_.loss_steps);
  progress_.loss_steps = steps;
}

// Rank 0's parameters, optimizer state and progress, to all ranks; and by what it has claimed its files.
absl::Status Trainer::BroadcastState() {
  const absl::Span<float> values = replica_->values();
  std::vector<ddp::Buffer> floats = {{values.data(), values.size(), ddp::DType::kFloat32, replica_->device()}};
  for (const nn::NamedState& state : optimizer_->state()) {
    floats.push_back({state.data.data(), state.data.size(), ddp::DType::kFloat32, replica_->device()});
  }
  device_.Wait();
  for (const nn::LayerBuffer& buffer : model_.buffers()) {
    floats.push_back({buffer.data.data(), buffer.data.size(), ddp::DType::kFloat32, replica_->device()});
  }
  const ddp::Buffer numbers[] = {{&progress_, sizeof(progress_), ddp::DType::kUInt8, {}},
                                 {&run_, sizeof(run_), ddp::DType::kUInt8, {}}};
  if (absl::Status status = group_->Broadcast(floats, 0, replica_->stream()).Wait(); !status.ok()) return status;
  if (absl::Status status = group_->Broadcast(numbers, 0).Wait(); !status.ok()) return status;
  optimizer_->set_steps(progress_.optimizer_steps);
  return absl::OkStatus();
}

// Parameters and buffers.
std::vector<Tensor> Trainer::Weights() {
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < model_.parameters().size(); ++i) {
    const nn::ParameterSpec& spec = model_.parameters()[i];
    tensors.push_back({spec.name, spec.shape, OnHost(replica_->values()).subspan(replica_->offset(i), spec.count())});
  }
  for (const nn::LayerBuffer& buffer : model_.buffers()) {
    tensors.push_back({buffer.name, buffer.shape, OnHost(buffer.data)});
  }
  return tensors;
}

// Parameter by parameter, so that a checkpoint depends neither on the memory's layout nor on the number of ranks. Each
// is followed by the optimizer's state for it.
std::vector<Tensor> Trainer::Tensors() {
  std::vector<Tensor> tensors;
  for (Tensor& tensor : Weights()) {
    const size_t i = tensors.size() / (1 + optimizer_->state().size());
    tensors.push_back(std::move(tensor));
    if (i >= model_.parameters().size()) continue;
    const nn::ParameterSpec& spec = model_.parameters()[i];
    for (const nn::NamedState& state : optimizer_->state()) {
      tensors.push_back({absl::StrCat(spec.name, "/", state.name), spec.shape,
                         OnHost(state.data).subspan(replica_->offset(i), spec.count())});
    }
  }
  return tensors;
}

// By rank 0, whose buffers all ranks train on with.
absl::Status Trainer::ExportWeights() {
  if (flags_.export_weights.empty()) return absl::OkStatus();
  absl::Status status;
  if (group_->rank() == 0) {
    const std::vector<Tensor> weights = Weights();
    Mirror(/*to_host=*/true);
    status = SaveSafetensors(*exported_, weights, progress_.step * flags_.accumulate);
  }
  return AgreeOn(*group_, status);
}

// On a GPU, memory of the host's that stands for a part of the state: see Mirror.
absl::Span<float> Trainer::OnHost(absl::Span<float> state) {
  if (device_.is_host()) return state;
  std::vector<float>& mirror = mirrors_[state.data()];
  mirror.resize(state.size());
  return absl::MakeSpan(mirror);
}

void Trainer::Mirror(bool to_host) {
  for (auto& [state, mirror] : mirrors_) {
    const size_t bytes = mirror.size() * sizeof(float);
    if (to_host) {
      device_.Download(state, mirror.data(), bytes);
    } else {
      device_.Upload(mirror.data(), state, bytes);
    }
  }
  device_.Wait();
}

// Waits for the device. What was exchanged there may have failed since the host started it: then steps that are counted
// have changed nothing, and statistics of layers are wrong.
absl::Status Trainer::AwaitSteps() {
  device_.Wait();
  absl::Status status = group_->status();
  if (sync_ != nullptr) status.Update(sync_->group().status());
  return status;
}

// Begins to write the checkpoint.
absl::Status Trainer::Save() {
  if (flags_.save.empty()) return absl::OkStatus();
  if (absl::Status status = AwaitSteps(); !status.ok()) return status;
  TakeLosses(started_);
  if (progress_.epoch_samples > 0) {
    double sums[] = {LossIsLost() ? NAN : loss_sum_, static_cast<double>(loss_steps_)};
    const ddp::Buffer buffer = {sums, std::size(sums), ddp::DType::kFloat64, {}};
    if (absl::Status status = group_->AllReduce(buffer, buffer).Wait(); !status.ok()) return status;
    if (!std::isfinite(sums[0])) return LostLoss();
    progress_.loss_sum = sums[0];
    progress_.loss_steps = static_cast<int64_t>(sums[1]);
  }
  progress_.optimizer_steps = optimizer_->steps();
  if (scaler_ != nullptr) {
    const absl::StatusOr<ddp::GradScalerState> state = scaler_->State();
    if (!state.ok()) return state.status();
    progress_.loss_scale = static_cast<double>(state->scale);
    progress_.growth_tracker = state->growth_tracker;
  }
  if (writer_ != nullptr) {
    const std::vector<Tensor> tensors = Tensors();
    Mirror(/*to_host=*/true);
    writer_->Start(progress_, tensors);
  }
  return absl::OkStatus();
}

// Waits until all is written, and fails on all ranks where it is not.
absl::Status Trainer::FinishSaving() {
  if (flags_.save.empty()) return absl::OkStatus();
  return AgreeOn(*group_, writer_ != nullptr ? writer_->Finish() : absl::OkStatus());
}

}  // namespace examples
