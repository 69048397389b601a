// SPDX-License-Identifier: Apache-2.0
// One step: gradients are announced, reduced, and their order is learnt from.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/model.h"

namespace ddp {

// --- announcements --------------------------------------------------------------------------------------------------

absl::Status Model::BeginForward(Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (absl::Status s = CheckStreamOf("BeginForward", stream); !s.ok()) return s;
  if (!options_.broadcast_buffers || options_.buffers.empty() || !last_was_reduced_) return absl::OkStatus();
  if (absl::Status s = CheckBetweenSteps("BeginForward"); !s.ok()) return s;
  const absl::StatusOr<bool> capturing = Capturing(stream);
  if (!capturing.ok()) return Named("BeginForward", capturing.status());
  if (*capturing) {
    if (absl::Status s = Capturable(); !s.ok()) return Named("BeginForward", s);
  }
  int root = 0;
  if (join_.has_value()) {
    absl::Status s = JoinLasts("BeginForward");
    if (s.ok()) s = StartMeeting(StepNote::kForward);
    if (s.ok()) s = FinishMeeting();
    if (!s.ok()) return s;
    root = meeting_->first_active;
    meeting_.reset();
  }
  std::vector<Buffer> buffers;
  for (const ModelBuffer& b : options_.buffers) buffers.push_back(b.data);
  return Named("BeginForward", Broadcast(buffers, root, stream));
}

void Model::BeginStep(Stream stream) {
  if (in_step_) return;
  begin_ns_ = NowNs();
  agreed_failure_ = false;
  ForgetGivenGradients();
  reducing_ = no_sync_ == 0;
  if (reducing_) BeginReduction(stream);
  in_step_.store(true, std::memory_order_release);
}

void Model::BeginReduction(Stream stream) {
  reducer_.Begin(begin_ns_);
  const absl::StatusOr<bool> capturing = Capturing(stream);
  misuse_.Update(capturing.status());
  capturing_ = capturing.value_or(false);
  observing_ = !capturing_ && ReplanDue();
  order_size_ = 0;
  copied_out_ = 0;
  // All ranks find the same, and nothing of the step has been called.
  absl::Status begin = JoinLasts("GradReady");
  if (begin.ok() && capturing_) begin = Capturable();
  if (!begin.ok()) {
    agreed_failure_ = misuse_.ok();
    return misuse_.Update(begin);
  }
  if (options_.check_nan) nan_check_.Begin();
  misuse_.Update(ZeroIdle(stream));
  if (streams_.on_gpu()) {
    if (!capturing_) ReadTimer();
    const int64_t step = statistics_.steps() + 1;
    if (capturing_) {
      // An event between two kernels takes longer than what is between them without it.
      const bool measured = options_.time_replays && group_->size() > 1;
      reducer_.UseTimer(graph_steps_.Begin(measured, reducer_.names(), streams_.Use(stream)));
    } else if (step < 4 || step % 16 == 0 || ObserverOf(*group_) != nullptr) {
      reducer_.timer().Begin(step, begin_ns_, reducer_.names(), streams_.Use(stream));
    }
  }
  if (!Meets()) return SetScale();
  if (absl::Status s = StartMeeting(StepNote::kStep); !s.ok()) misuse_.Update(s);
}

// The program's last step may still be reading what is zeroed here.
absl::Status Model::ZeroIdle(Stream stream) {
  std::vector<size_t> idle;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (roles_[i] == Role::kIdle) idle.push_back(i);
  }
  if (idle.empty()) return absl::OkStatus();
  const absl::StatusOr<Stream> own = streams_.OwnBehind(stream);
  absl::Status status = own.status();
  for (const size_t i : idle) {
    status.Update(UseStandIn(i));
    if (status.ok()) status = Zero(all_[i].slot, streams_.Use(*own));
    Arrive(i);
  }
  return status;
}

void Model::Arrive(size_t index) {
  if (reducer_.CountDown(index)) reducer_.Ready(index);
}

void Model::GradReady(size_t index, Stream stream) noexcept {
  const absl::Status ordered = CheckStream(device_, stream);
  if (!in_step_.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(mutex_);
    BeginStep(ordered.ok() ? stream : kNoStream);
  }
  const auto misused = [this](const auto&... what) {
    std::lock_guard<std::mutex> lock(mutex_);
    Misused(absl::StrCat(what...));
  };
  if (index >= all_.size()) return misused("GradReady(", index, "): there are ", all_.size(), " parameters");
  const Trained& trained = all_[index];
  if ((announced_[index].fetch_or(kNow | kSince | kHeld, std::memory_order_relaxed) & kNow) != 0) {
    return misused("the gradient of '", trained.parameter.name,
                   "' was announced twice in one step; announce it once, after its last contribution, and call "
                   "FinishBackward after every backward pass");
  }
  if (roles_[index] != Role::kTrained) {
    return misused("the gradient of '", trained.parameter.name, "' was announced, but the parameter ",
                   roles_[index] == Role::kFrozen
                       ? "is frozen; SetParameters changes that"
                       : "was not used in the first step; without DdpOptions::static_graph that may change");
  }
  if (trained.given_by_step && !trained.given && trained.slot.count > 0) {
    return misused("the gradient of '", trained.parameter.name,
                   "' was announced before its memory was given; call SetGrad first, in every step");
  }
  if (!ordered.ok()) {
    std::lock_guard<std::mutex> lock(mutex_);
    Misused(absl::StrCat("GradReady of '", trained.parameter.name, "': ", ordered.message()), ordered.code());
    return;
  }
  stream = streams_.Use(stream);
  if (!reducing_.load(std::memory_order_relaxed)) return;
  if (options_.check_nan || observing_.load(std::memory_order_relaxed)) {
    order_[order_size_.fetch_add(1, std::memory_order_relaxed)] = static_cast<uint32_t>(index);
  }
  if (trained.copied()) CopyIn(index, stream);
  // The last one to come sees what all the others have written.
  if (reducer_.CountDown(index)) {
    std::lock_guard<std::mutex> lock(mutex_);
    reducer_.Ready(index);
    TryAdvance(stream);
  }
  if (reducer_.launched() == 0 && !Meets()) return;
  // A step of the backward pass is a good moment for this rank's share of what all ranks have announced.
  group_->Progress();
  if (std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock.owns_lock()) TryAdvance(stream);
}

void Model::TryAdvance(Stream stream) {
  if (!misuse_.ok()) return;
  if (Meets() && !meeting_.has_value()) {
    if (!meeting_work_.Done()) return;
    misuse_ = FinishMeeting();
    if (!misuse_.ok()) return;
    SetScale();
  }
  reducer_.Advance(stream);
  misuse_.Update(CopyOutDone(stream));
}

// The program may never ask for the error, so it is logged, too.
void Model::Misused(absl::string_view what, absl::StatusCode code) {
  if (misuse_.ok()) LogError("rank ", group_->rank(), ": ", what);
  misuse_.Update(absl::Status(code, absl::StrCat("rank ", group_->rank(), ": ", what)));
}

absl::Status Model::CheckStreamOf(absl::string_view call, Stream stream) const {
  return Named(call, CheckStream(device_, stream));
}

// The gradients of a reduced step are the library's, and so are the ranks' notes. Those of a step whose group has
// failed are nobody's any more.
absl::Status Model::CheckBetweenSteps(absl::string_view call) const {
  if (!in_step_ || !reducing_ || !group_->status().ok()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", group_->rank(), ": ", call,
                   " in the middle of a step; call it before the first GradReady or after FinishBackward"));
}

absl::StatusOr<Stream> Model::Follow(absl::string_view call, Stream stream) {
  if (absl::Status s = CheckStreamOf(call, stream); !s.ok()) return s;
  const absl::StatusOr<Stream> followed = streams_.Follow(stream);
  if (!followed.ok()) return Named(call, followed.status());
  return followed;
}

// --- the end of a step ----------------------------------------------------------------------------------------------

absl::Status Model::FinishBackward(Stream stream) {
  const TraceScope scope(*group_, "FinishBackward");
  std::lock_guard<std::mutex> lock(mutex_);
  BeginStep(CheckStream(device_, stream).ok() ? stream : kNoStream);
  const absl::StatusOr<Stream> followed = Follow("FinishBackward", stream);
  misuse_.Update(followed.status());
  if (!reducing_ && misuse_.ok()) misuse_ = streams_.EndUnreduced(*followed);
  const absl::Status status =
      Named("FinishBackward", reducing_ && misuse_.ok() ? Reduce(streams_.Use(*followed)) : misuse_);
  if (!status.ok() && !agreed_failure_) GiveUp(status);
  last_was_reduced_ = reducing_;
  EndStep();
  return status;
}

// The peers wait for buckets that will not come: tell them why. A failed group says so itself.
void Model::GiveUp(const absl::Status& why) {
  if (group_->status().ok()) group_->Abort(why);
  Abandon();
}

absl::Status Model::Reduce(Stream stream) {
  const int64_t entered = NowNs();
  absl::Status status = misuse_;
  if (status.ok()) status = CheckGivenGradients();
  if (status.ok()) status = Settle(stream);
  if (status.ok() && Meets() && !meeting_.has_value()) {
    status = FinishMeeting();
    if (status.ok()) SetScale();
  }
  if (status.ok()) status = Communicate(stream);
  if (!status.ok()) return status;
  if (streams_.on_gpu()) {
    // What is captured is a step when it is replayed, and a capture may not ask for events.
    if (!capturing_) {
      statistics_.CountStep();
      ReadTimer();
    }
  } else {
    statistics_.CountStep();
    Record(TimesOfStep(NowNs() - entered));
  }
  status = EndReduction();
  return status.ok() ? TellFinding() : status;
}

// Every gradient has arrived: launches what has not been, and waits.
absl::Status Model::Communicate(Stream stream) {
  absl::Status status = reducer_.IssueAll(stream);
  if (status.ok() && Detecting()) status = StartUsedMap();
  if (status.ok()) status = BeginReplicaCheck(stream);
  if (status.ok()) status = reducer_.WaitAll(stream);
  if (status.ok()) status = replicas_.Fetch(stream);
  if (status.ok()) status = CopyOutDone(stream);
  if (status.ok() && Detecting()) status = FinishUsedMap(stream);
  if (status.ok() && options_.check_nan) status = FinishNanCheck();
  if (status.ok() && streams_.on_gpu()) status = FinishOnGpu(stream);
  return status.ok() ? StatusOfWatched() : status;
}

void Model::Watch(ProcessGroup& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  watched_.push_back(&group);
}

// A group numbers its own ranks: the failed ranks of another one mean nothing here.
absl::Status Model::StatusOfWatched() const {
  for (const ProcessGroup* const group : watched_) {
    if (const absl::Status s = group->status(); !s.ok()) return absl::Status(s.code(), s.message());
  }
  return absl::OkStatus();
}

// What failed by the time the stream gets here, or ended with numbers that are none, must not be used. Where the
// program has not given a stream, the host waits.
absl::Status Model::FinishOnGpu(Stream stream) {
  const DeviceGuard guard(Devices(), device_);
  if (!guard.status().ok()) return guard.status();
  absl::Status status =
      Devices().Commit(group_->failed_word(), options_.nonfinite, static_cast<uint32_t*>(skip_step_.get()),
                       capturing_ ? graph_steps_.counter() : nullptr, stream.native);
  for (const ProcessGroup* const group : watched_) {
    auto* const skip = static_cast<uint32_t*>(skip_step_.get());
    if (!status.ok() || group->failed_word() == nullptr) continue;  // null on the CPU, whose work the host awaits
    status = Devices().Commit(group->failed_word(), skip, skip, nullptr, stream.native);
  }
  if (!status.ok() || stream.native != streams_.own().native) return status;
  status = reducer_.Abandon();
  return status.ok() ? Synchronize(stream) : status;
}

// What the GPU has measured by now.
void Model::ReadTimer() {
  std::optional<MeasuredStep> step = reducer_.timer().Read();
  if (step.has_value()) Record(*std::move(step));
  // When a replay began by the host's clock nobody knows, so the observer is not told.
  step = graph_steps_.Read();
  if (step.has_value()) statistics_.Record(std::move(step->buckets), step->exposed_ns);
}

// On the CPU, of the step that ends.
MeasuredStep Model::TimesOfStep(int64_t exposed_ns) const {
  return {statistics_.steps(), begin_ns_, exposed_ns, reducer_.times(), reducer_.names()};
}

void Model::Record(MeasuredStep step) {
  if (Observer* const observer = ObserverOf(*group_); observer != nullptr) {
    for (size_t b = 0; b < step.buckets.size(); ++b) {
      const BucketTimes& t = step.buckets[b];
      observer->OnBucket({step.step, static_cast<int>(b), t.bytes, step.begin_ns + t.ready_ns,
                          step.begin_ns + t.launched_ns, step.begin_ns + t.done_ns, (*step.names)[b]});
    }
  }
  statistics_.Record(std::move(step.buckets), step.exposed_ns);
}

// The next pass is the first one of a new accumulation.
void Model::ForgetPasses() {
  for (size_t i = 0; i < all_.size(); ++i) announced_[i].store(0, std::memory_order_relaxed);
  for (Trained& trained : all_) trained.given = false;
}

// What a reduced step leaves to the next ones.
absl::Status Model::EndReduction() {
  if (capturing_) return absl::OkStatus();  // the plan stays: all ranks have to make a new one after the same step
  ++steps_of_list_;
  const bool fewer = RecordStaticGraph();
  return observing_ || fewer ? Replan(fewer) : absl::OkStatus();
}

void Model::EndStep() {
  if (reducing_) {
    reducer_.End();
    ForgetPasses();
  } else {
    for (size_t i = 0; i < all_.size(); ++i) announced_[i].fetch_and(kSince | kHeld, std::memory_order_relaxed);
  }
  left_out_.clear();
  kept_.clear();
  meeting_.reset();
  misuse_ = absl::OkStatus();
  agreed_failure_ = false;
  in_step_.store(false, std::memory_order_release);
}

void Model::ZeroGrad(Stream stream) {
  if (const absl::Status s = CheckBetweenSteps("ZeroGrad"); !s.ok()) {
    std::lock_guard<std::mutex> lock(mutex_);
    LogError(s.message());
    misuse_.Update(s);
    return;
  }
  // What the library owns lies together, and what is reduced in place may.
  std::vector<Buffer> all = memory_->grad_spans(), in_place;
  for (const Trained& t : all_) {
    if (!t.owned && t.parameter.grad.data != nullptr) (t.in_place ? in_place : all).push_back(t.parameter.grad);
  }
  in_place = memory_->Merge(in_place);
  all.insert(all.end(), in_place.begin(), in_place.end());
  const absl::StatusOr<Stream> followed = Follow("ZeroGrad", stream);
  absl::Status status = followed.status();
  if (status.ok()) status = Zero(all, *followed);
  if (status.ok()) status = streams_.Complete(*followed);
  if (status.ok()) {
    for (size_t i = 0; i < all_.size(); ++i) announced_[i].fetch_and(kNow | kSince, std::memory_order_relaxed);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  misuse_.Update(Named("ZeroGrad", status));
}

DdpStatistics Model::statistics() {
  std::lock_guard<std::mutex> lock(mutex_);
  ReadTimer();
  DdpStatistics statistics = statistics_.Get();
  statistics.steps = StepsSoFar();
  return statistics;
}

// --- the order of gradients -----------------------------------------------------------------------------------------

// The first reduced step shows the order. Later ones may show that it has drifted.
bool Model::ReplanDue() const {
  const int64_t step = steps_of_list_ + 1;
  return options_.replan && (step == 1 || step == 10 || step == 100 || step % 1000 == 0);
}

// As this rank saw it, if it has looked; what was not announced comes last, as planned.
std::vector<size_t> Model::ObservedOrder(bool looked) const {
  std::vector<size_t> order;
  std::vector<bool> seen(all_.size());
  const auto add = [&](size_t i) {
    if (!seen[i] && roles_[i] != Role::kUnused) order.push_back(i);
    seen[i] = true;
  };
  if (looked) {
    for (size_t k = 0; k < order_size_; ++k) add(order_[k]);
  }
  for (const Bucket& bucket : reducer_.plan()) std::for_each(bucket.items.begin(), bucket.items.end(), add);
  return order;
}

// All ranks plan by what one of them saw, if it finds that worth while. `must`: they know that they have to.
absl::Status Model::Replan(bool must) {
  const std::vector<size_t> observed = ObservedOrder(observing_);
  std::vector<uint32_t> message(observed.begin(), observed.end());
  const int root = meeting_.has_value() ? meeting_->first_active : 0;
  if (group_->rank() == root) {
    std::vector<BucketItem> items;
    for (const Trained& t : all_) items.push_back({t.slot.dtype, t.slot.count * SizeOf(t.slot.dtype)});
    must |= steps_of_list_ == 1 ? !SamePlan(reducer_.plan(), PlanBuckets(items, observed, caps_.bucket))
                                : Lateness(reducer_.plan(), items, observed) > caps_.bucket.others;
  }
  message.push_back(must);
  if (absl::Status s = ddp::BroadcastValues(*group_, absl::MakeSpan(message), root); !s.ok()) return s;
  if (message.back() == 0) return absl::OkStatus();
  message.pop_back();
  LogDebug("rank ", group_->rank(), ": new buckets after step ", statistics_.steps());
  return Plan(std::vector<size_t>(message.begin(), message.end()));
}

}  // namespace ddp
