// SPDX-License-Identifier: Apache-2.0
// How a Trainer goes on after its group has failed.
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/sync_state.h"
#include "examples/train/agreement.h"
#include "examples/train/trainer.h"

namespace examples {
namespace {

constexpr int64_t kNoState = std::numeric_limits<int64_t>::max();  // as SyncState calls the step of half a state

}  // namespace

// All ranks decide alike, since a group's first cause of failure is the same on all of them. Who has given up by itself
// (Aborted) does not come, and who makes a mistake makes it again.
bool Trainer::MayRecover() const {
  if (!flags_.recover || context_ == nullptr || vain_recoveries_ > 1) return false;
  switch (group_->status().code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
      return false;
    default:
      return true;
  }
}

// In the new group: from the last step that all ranks have completed.
absl::Status Trainer::GoOn(int rank_before) {
  ForgetStepsUnderWay();
  // Whose buffers all take has received them from a rank that is gone now, perhaps in the middle of it.
  if (group_->rank() == 0 && rank_before != 0) RestoreBuffers();
  // A GPU knows how many of the steps it has done: it stops those that come after the failure, and may have done one
  // more than the host has learned.
  const int64_t done = device_.is_host() ? progress_.step : optimizer_->steps() + uncounted_steps_;
  while (progress_.step < done) Advance();
  while (progress_.step > done) StepBack();
  if (absl::Status status = CheckForProgress(); !status.ok()) return status;
  if (absl::Status status = replica_->Rebind(*group_); !status.ok()) return status;
  if (absl::Status status = ShareState(); !status.ok()) return status;
  recovered_at_ = progress_.step;
  const size_t global_batch = loader_->global_batch();
  DivideData();
  progress_.epoch_samples -= progress_.epoch_samples % static_cast<int64_t>(loader_->global_batch());
  PlanSteps();
  if (loader_->global_batch() != global_batch) MeasureAnew();
  if (absl::Status status = ShareNotices(); !status.ok()) return status;
  // A rank that has died may still be ending, and hold what it had claimed.
  if (absl::Status status = AgreeOn(*group_, ClaimFiles(absl::Seconds(10))); !status.ok()) return status;
  ChooseGraphs();
  due_ = progress_.step > first_step_ && (progress_.epoch_samples == 0 || Finished());
  if (group_->rank() == 0) console_.Show();
  console_.Print(absl::StrCat("recovered: ", context_->backend_choice().text, "; goes on from step ", progress_.step,
                              uses_graphs_        ? "; captures its CUDA graphs anew"
                              : flags_.cuda_graph ? absl::StrCat("; without a CUDA graph: ", WhyNoGraphs())
                                                  : "",
                              "\n"));
  return absl::OkStatus();
}

// A recovery may fail, as other ranks die. But each has to lose a rank, or to be followed by a step of all: there is an
// end to both.
absl::Status Trainer::CheckForProgress() {
  const bool in_vain = progress_.step == recovered_at_ && group_->size() == recovered_size_;
  vain_recoveries_ = in_vain ? vain_recoveries_ + 1 : 0;
  recovered_at_ = progress_.step;
  recovered_size_ = group_->size();
  if (!in_vain) return AgreeOn(*group_, absl::OkStatus());
  return AgreeOn(*group_,
                 absl::UnavailableError(absl::StrCat("the step after a recovery has failed, too (",
                                                     context_->backend_choice().failure, "); end of the recoveries")));
}

// When rank 0's have arrived everywhere.
void Trainer::KeepBuffers() {
  if (!flags_.recover) return;
  kept_buffers_.clear();
  for (const nn::LayerBuffer& buffer : model_.buffers()) {
    kept_buffers_.emplace_back(buffer.data.size());
    device_.Download(buffer.data.data(), kept_buffers_.back().data(), buffer.data.size() * sizeof(float));
  }
  device_.Wait();
}

void Trainer::RestoreBuffers() {
  const std::vector<nn::LayerBuffer> buffers = model_.buffers();
  for (size_t i = 0; i < kept_buffers_.size(); ++i) {
    device_.Upload(kept_buffers_[i].data(), buffers[i].data.data(), kept_buffers_[i].size() * sizeof(float));
  }
  device_.Wait();
}

// Figures of the ranks that are left: rates of different numbers of ranks have no mean.
void Trainer::MeasureAnew() {
  step_times_.Restart();
  communication_times_.Restart();
  measured_from_ = started_ + flags_.warmup;
  if (energy_ != nullptr) energy_->Clear();
}

// Their losses are not counted: the steps are repeated.
void Trainer::ForgetStepsUnderWay() {
  notice_.reset();
  device_.Wait();
  taken_ = timed_ = started_;
  loss_not_finite_ = false;
  // A step may have ended before its losses.
  const auto calls = static_cast<uint64_t>(started_ * flags_.accumulate);
  device_.Upload(&calls, loss_ring_.calls, sizeof calls);
  device_.Wait();
}

// Parameters, optimizer state and the place in the data, from a rank at the lowest step. An earlier recovery, which has
// failed, may have cut the epoch for fewer ranks on some of them. Layers' buffers are rank 0's in each step anyway.
absl::Status Trainer::ShareState() {
  struct Numbers {
    int64_t optimizer_steps = 0, epoch = 0, epoch_samples = 0;
    ddp::GradScalerState scaler = {};
  };
  Numbers numbers{
      .optimizer_steps = optimizer_->steps(), .epoch = progress_.epoch, .epoch_samples = progress_.epoch_samples};
  if (scaler_ != nullptr) {
    const absl::StatusOr<ddp::GradScalerState> state = scaler_->State();
    if (!state.ok()) return state.status();
    numbers.scaler = *state;
  }
  const absl::Span<float> values = replica_->values();
  std::vector<ddp::Buffer> state = {{values.data(), values.size(), ddp::DType::kFloat32, replica_->device()},
                                    {&numbers, sizeof numbers, ddp::DType::kUInt8, {}}};
  for (const nn::NamedState& part : optimizer_->state()) {
    state.push_back({part.data.data(), part.data.size(), ddp::DType::kFloat32, replica_->device()});
  }
  int64_t step = half_taken_over_ ? kNoState : progress_.step;
  const absl::StatusOr<int64_t> common = ddp::SyncState(*group_, step, state);
  half_taken_over_ = step == kNoState;
  if (absl::IsDataLoss(common.status())) return Agreed(common.status());
  if (!common.ok()) return common.status();
  progress_.step = *common;
  progress_.epoch = numbers.epoch;
  progress_.epoch_samples = numbers.epoch_samples;
  optimizer_->set_steps(numbers.optimizer_steps);
  return scaler_ == nullptr ? absl::OkStatus() : scaler_->Load(numbers.scaler);
}

void Trainer::StepBack() {
  const auto global_batch = static_cast<int64_t>(loader_->global_batch());
  if (progress_.epoch_samples == 0) {
    --progress_.epoch;
    progress_.epoch_samples = static_cast<int64_t>(loader_->batches()) * global_batch;
  }
  progress_.epoch_samples -= global_batch;
  --progress_.step;
}

}  // namespace examples
