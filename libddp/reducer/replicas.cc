// SPDX-License-Identifier: Apache-2.0
// Keeping the ranks' values equal: copying them, and noticing when they are not.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/reducer/model.h"

namespace ddp {

absl::Status Model::BroadcastValues(int root, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (absl::Status s = CheckStreamOf("BroadcastValues", stream); !s.ok()) return s;
  const auto refuse = [this](absl::string_view why) {
    return absl::FailedPreconditionError(absl::StrCat("rank ", group_->rank(), ": BroadcastValues ", std::string(why)));
  };
  if (in_step_) return refuse("in the middle of a step; call it after FinishBackward");
  if (join_.has_value() && !join_over_) return refuse("inside a Join, whose Finish makes values equal");
  replicas_.Drop();  // what differed before does not count any more
  return Named("BroadcastValues", Broadcast(ValuesAndBuffers(), root, stream));
}

// After the step's last bucket has been launched, on all ranks alike: what the check before has found, and the next one
// if it is due. The host never sees the end of one that is captured into a graph.
absl::Status Model::BeginReplicaCheck(Stream stream) {
  if (absl::Status s = replicas_.Finish(&finding_); !s.ok()) return s;
  if (!replicas_.Due(statistics_.steps())) return absl::OkStatus();
  if (streams_.on_gpu()) {
    const absl::StatusOr<bool> capturing = streams_.Capturing(stream);
    if (!capturing.ok() || *capturing) return capturing.status();
  }
  std::vector<Replica> replicas;
  for (const Trained& t : all_) {
    replicas.push_back({absl::StrCat("parameter '", t.parameter.name, "'"), t.parameter.value});
  }
  for (const ModelBuffer& b : options_.buffers) {
    if (b.replicated) replicas.push_back({absl::StrCat("buffer '", b.name, "'"), b.data});
  }
  return replicas_.Begin(*group_, statistics_.steps(), !shadowing_, std::move(replicas), stream);
}

// All ranks have found the same, and end this step with it.
absl::Status Model::TellFinding() {
  if (finding_.ok()) return absl::OkStatus();
  if (group_->rank() == 0) LogError(finding_.message());
  agreed_failure_ = true;
  join_over_ = true;
  return std::exchange(finding_, absl::OkStatus());
}

// Between steps: waits for the check under way. What it has found, on all ranks alike.
absl::Status Model::FinishReplicaCheck(absl::FunctionRef<bool()> give_up) {
  absl::Status status = replicas_.Finish(&finding_, give_up);
  if (status.ok()) status = TellFinding();
  agreed_failure_ = false;
  return status;
}

// The sums are done. With a word for what is not finite such steps are part of training, and only logged.
absl::Status Model::FinishNanCheck() {
  if (nan_check_.captured()) return absl::OkStatus();
  if (streams_.on_gpu()) {
    const absl::Status status = Synchronize(streams_.own(), [this] { return !group_->status().ok(); });
    if (!status.ok()) return group_->status().ok() ? status : group_->status();
  }
  absl::Status found;
  const absl::Status status = nan_check_.Finish(*group_, ObservedOrder(true), all_, StepsSoFar() + 1, &found);
  if (options_.nonfinite == nullptr) {
    finding_.Update(found);
  } else if (!found.ok() && group_->rank() == 0) {
    LogWarn(found.message());
  }
  return status;
}

// Of a model that goes: gradients that some backward pass has left and no step has reduced.
void Model::WarnOfLostGradients() const {
  std::vector<size_t> lost;
  for (size_t i = 0; i < all_.size(); ++i) {
    if ((announced_[i].load(std::memory_order_relaxed) & kHeld) != 0) lost.push_back(i);
  }
  if (lost.empty() || !group_->status().ok()) return;
  LogWarn(
      "rank ", group_->rank(),
      ": a DistributedDataParallel was destroyed with accumulated gradients that no step has reduced: ", Names(lost),
      ". Ranks that use them train apart; run the last backward pass of an accumulation outside of NoSync, up to "
      "FinishBackward");
}

}  // namespace ddp
