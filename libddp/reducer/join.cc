// SPDX-License-Identifier: Apache-2.0
// Ranks with unequal weights, or unequal numbers of steps.
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/grad_scaler.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/model.h"

namespace ddp {

absl::Status Model::StartMeeting(StepNote::Kind kind) {
  note_ = StepNote{};
  note_.kind = kind;
  note_.weight = weight_;
  if (join_.has_value()) {
    note_.joined = 1;
    note_.result = result_;
    note_.divide_by_active = join_->divide_by_active;
    note_.throw_on_early = join_->throw_on_early;
    note_.scaled = join_->scaler != nullptr && join_->scaler->enabled();
  }
  meeting_work_ = StartGather<StepNote>(*group_, {&note_, 1}, absl::MakeSpan(notes_));
  return meeting_work_.call_status();
}

absl::Status Model::FinishMeeting() {
  if (absl::Status s = meeting_work_.Wait(); !s.ok()) return s;
  absl::StatusOr<Meeting> meeting = ReadNotes(notes_, group_->rank(), options_.op, options_.weighted);
  if (!meeting.ok()) {
    agreed_failure_ = true;  // everybody has read the same notes
    join_over_ = true;
    return meeting.status();
  }
  meeting_ = *meeting;
  if (meeting->active > 0) last_active_ = meeting->last_active;
  return absl::OkStatus();
}

void Model::SetScale() {
  const double factor = options_.gradient_predivide_factor;
  StepScale scale;
  scale.reduce = {.op = options_.op, .prescale = 1 / factor, .postscale = factor};
  if (options_.op == ReduceOp::kSum) scale.share = 1.0 / group_->size();
  if (meeting_.has_value()) {
    scale.reduce.op = ReduceOp::kSum;
    scale.reduce.postscale = factor / meeting_->divisor;
    scale.local = meeting_->local;
    scale.share = meeting_->share;
    // Weights of a sum may be large: then what is added up in 16 bits would be infinite before it is divided.
    if (options_.weighted && options_.op == ReduceOp::kSum) {
      scale.reduce.prescale = 1;
      scale.local /= factor;
      scale.share /= factor;
    }
  }
  reducer_.SetScale(scale, statistics_.steps());
}

// Why no Join can begin now; empty if one can.
absl::string_view Model::AgainstJoin() const {
  if (join_.has_value() && !join_over_) {
    return "a Join begun inside of another one; call Finish of the first one before";
  }
  // Without a meeting nobody would know its divisor.
  return in_step_ && reducing_ ? "a Join begun in the middle of a step; begin it after FinishBackward" : "";
}

absl::Status Model::CanJoin() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const absl::string_view why = AgainstJoin();
  if (why.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("rank ", group_->rank(), ": ", why));
}

uint64_t Model::BeginJoin(JoinOptions options) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const absl::string_view why = AgainstJoin(); !why.empty()) {
    Misused(why);
    return 0;
  }
  join_ = std::move(options);
  join_over_ = false;
  last_active_ = 0;
  result_ = StepNote::kNone;
  last_was_reduced_ = true;  // however the ranks' last passes were
  return ++join_ticket_;
}

// Once all ranks have had an error, those that have no more inputs have left.
absl::Status Model::JoinLasts(absl::string_view call) const {
  if (!join_.has_value() || !join_over_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", group_->rank(), ": ", std::string(call),
      ": this Join is over, since all ranks have had an error; destroy it (in C: ddp_model_leave_join) before the "
      "next step"));
}

void Model::LeaveJoin(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!join_.has_value() || ticket != join_ticket_) return;  // another one lasts, or none
  if (!join_over_ && group_->status().ok()) {
    group_->Abort(absl::AbortedError(absl::StrCat("rank ", group_->rank(), " left a Join without Finish")));
  }
  join_.reset();
}

// Takes part in what the others do until they are through too; then all take the model, and the scale of the loss, of
// one that went on longest.
absl::Status Model::FinishJoin(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (ticket == 0) return absl::FailedPreconditionError("Join::Finish: this Join was refused when it was begun");
  if (!join_.has_value() || ticket != join_ticket_) {
    return absl::FailedPreconditionError("Join::Finish again: this Join is over");
  }
  if (absl::Status s = JoinLasts("Join::Finish"); !s.ok()) return s;
  if (in_step_) return absl::FailedPreconditionError("Join::Finish in the middle of a step");
  absl::Status status = ShadowOthers(lock);
  if (status.ok()) status = TakeResult(meeting_->giver < 0 ? last_active_ : meeting_->giver);
  // After the failure of the group it goes on once Rebind has found another.
  join_over_ |= agreed_failure_;
  if (status.ok() || join_over_) {  // an accumulation that this cuts off is over, too
    ForgetPasses();
    last_was_reduced_ = true;
  }
  if (status.ok()) join_.reset();  // steps are as without it
  agreed_failure_ = false;
  meeting_.reset();
  return status;
}

// If the group fails meanwhile, the next one has to know who has what.
absl::Status Model::TakeResult(int giver) {
  result_ = group_->rank() == giver ? StepNote::kWhole : StepNote::kPart;
  if (absl::Status s = Broadcast(ValuesAndBuffers(), giver); !s.ok()) return s;
  if (join_->scaler != nullptr) {
    if (absl::Status s = join_->scaler->Broadcast(*group_, giver); !s.ok()) return s;
  }
  result_ = StepNote::kWhole;
  return absl::OkStatus();
}

absl::Status Model::ShadowOthers(std::unique_lock<std::mutex>& lock) {
  while (true) {
    absl::Status status = StartMeeting(StepNote::kThrough);
    if (status.ok()) status = FinishMeeting();
    if (!status.ok() || meeting_->kind == StepNote::kThrough) return status;
    if (meeting_->kind == StepNote::kForward) {
      std::vector<Buffer> buffers;
      for (const ModelBuffer& b : options_.buffers) buffers.push_back(b.data);
      status = Broadcast(buffers, meeting_->first_active);
    } else {
      status = ShadowStep();
      if (status.ok() && join_->on_shadowed_step != nullptr) {
        lock.unlock();  // it may call the model
        status = join_->on_shadowed_step();
        lock.lock();
        if (!status.ok()) status = Named("on_shadowed_step", WithRanksOf(group_->status(), status));
        if (!status.ok()) GiveUp(status);
      }
    }
    if (!status.ok()) return status;
  }
}

// A step of the others, to which this rank contributes zeros.
absl::Status Model::ShadowStep() {
  begin_ns_ = NowNs();
  reducing_ = shadowing_ = true;
  observing_ = ReplanDue();
  order_size_ = copied_out_ = 0;
  reducer_.Begin(begin_ns_);
  if (options_.check_nan) nan_check_.Begin();
  SetScale();
  absl::Status status = streams_.Follow({}).status();  // the program may still be reading its last step's gradients
  const Stream stream = streams_.Use({});
  ForgetGivenGradients();
  for (size_t i = 0; i < all_.size(); ++i) {
    if (roles_[i] != Role::kTrained && roles_[i] != Role::kIdle) continue;
    if (Detecting()) {  // what no active rank uses stays as it is here, too
      status.Update(LeaveOut(i, stream));
      continue;
    }
    status.Update(Zero(all_[i].slot, stream));
    status.Update(UseStandIn(i));
    Arrive(i);
  }
  if (status.ok()) status = Communicate(stream);
  if (status.ok()) {
    statistics_.CountStep();
    if (!streams_.on_gpu()) Record(TimesOfStep(NowNs() - begin_ns_));
    status = EndReduction();
  }
  if (status.ok()) status = TellFinding();
  if (!status.ok() && !agreed_failure_) GiveUp(status);
  shadowing_ = false;
  EndStep();
  return status;
}

}  // namespace ddp
