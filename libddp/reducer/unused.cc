// SPDX-License-Identifier: Apache-2.0
// Parameters without a gradient in a reduced step.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/model.h"

namespace ddp {

// What has not been announced in this backward may have been in an earlier one that was not reduced: then its gradient
// is complete. The rest is unused, which is either an error or a contribution of zeros.
absl::Status Model::Settle(Stream stream) {
  std::vector<size_t> missing;
  for (size_t i = 0; i < all_.size(); ++i) {
    const uint8_t announced = announced_[i].load(std::memory_order_relaxed);
    if (roles_[i] != Role::kTrained || (announced & kNow) != 0) continue;
    if ((announced & kSince) == 0) {
      missing.push_back(i);
      continue;
    }
    if (!streams_.on_gpu()) {
      if (absl::Status s = CopyGradients({&i, 1}, true, stream); !s.ok()) return s;
    }
    Arrive(i);
  }
  if (missing.empty()) return absl::OkStatus();
  if (!Detecting()) return MissingError(missing);
  for (const size_t i : missing) {
    if (absl::Status s = LeaveOut(i, stream); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// "'a', 'b' and 7 more".
std::string Model::Names(absl::Span<const size_t> parameters) const {
  constexpr size_t kNamed = 8;
  std::string names;
  for (size_t k = 0; k < std::min(parameters.size(), kNamed); ++k) {
    absl::StrAppend(&names, k > 0 ? ", '" : "'", all_[parameters[k]].parameter.name, "'");
  }
  if (parameters.size() > kNamed) absl::StrAppend(&names, " and ", parameters.size() - kNamed, " more");
  return names;
}

absl::Status Model::MissingError(absl::Span<const size_t> missing) const {
  const bool none =
      std::none_of(announced_.get(), announced_.get() + all_.size(), [](const auto& a) { return a != 0; });
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", group_->rank(), ": step ", StepsSoFar() + 1, " ended without a gradient for ", Names(missing),
      none                    ? "; no gradient was announced at all: was FinishBackward called twice?"
      : options_.static_graph ? ", which the first step used; with DdpOptions::static_graph every step uses the same "
                                "parameters"
                              : "; announce every parameter in every reduced step, or set DdpOptions::unused to "
                                "kDetect, which leaves a gradient as it is if no rank announces it"));
}

// A contribution of zeros. The reduction may lie over the gradient itself, so what it was is kept for the case that
// nobody used it.
absl::Status Model::LeaveOut(size_t index, Stream stream) {
  const Trained& trained = all_[index];
  left_out_.push_back(index);
  kept_.emplace_back();
  if (trained.slot.count > 0 && trained.slot.data == trained.parameter.grad.data) {
    absl::StatusOr<StreamArray> copy = StreamArray::Make(trained.slot.count, trained.slot.dtype, stream);
    if (!copy.ok()) return copy.status();
    if (absl::Status s = CopyScaled(trained.slot, copy->span(), 1, stream); !s.ok()) return s;
    kept_.back() = *std::move(copy);
  }
  if (absl::Status s = Zero(trained.slot, stream); !s.ok()) return s;
  Arrive(index);
  return absl::OkStatus();
}

absl::Status Model::StartUsedMap() {
  used_map_.assign(all_.size(), 1);
  for (const size_t i : left_out_) used_map_[i] = 0;
  const Buffer map{used_map_.data(), used_map_.size(), DType::kUInt8, Device{}};
  used_work_ = group_->AllReduce(map, map, {.op = ReduceOp::kMax});
  return used_work_.call_status();
}

absl::Status Model::FinishUsedMap(Stream stream) {
  if (absl::Status s = used_work_.Wait(); !s.ok()) return s;
  if (steps_of_list_ == 0) WarnOfUnused();
  for (size_t k = 0; k < left_out_.size(); ++k) {
    const Trained& trained = all_[left_out_[k]];
    absl::Status status;
    if (used_map_[left_out_[k]] != 0) {
      status = UseStandIn(left_out_[k]);
      status.Update(CopyGradients({&left_out_[k], 1}, false, stream));
    } else if (kept_[k].has_value()) {
      status = CopyScaled(kept_[k]->span(), trained.slot, 1, stream);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// A gradient that every rank has forgotten to announce looks like one that none uses. Told once.
void Model::WarnOfUnused() const {
  std::vector<size_t> unused;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (roles_[i] == Role::kTrained && used_map_[i] == 0) unused.push_back(i);
  }
  if (unused.empty() || group_->rank() != 0) return;
  LogWarn("no rank has announced a gradient for ", Names(unused), " in the first step. With ",
          options_.static_graph ? "DdpOptions::static_graph" : "UnusedParameters::kDetect",
          " that is no error, and these gradients stay as each rank has them: if they are not zero, optimizers that "
          "read them take the ranks apart");
}

// After the first step of a static graph that all ranks have taken: one without inputs may use what the others do not.
// Returns whether there are parameters that need no bucket any more.
bool Model::RecordStaticGraph() {
  if (!options_.static_graph || static_known_) return false;
  if (meeting_.has_value() && meeting_->active < group_->size()) return false;
  static_known_ = true;
  bool fewer = false;
  for (const size_t i : left_out_) roles_[i] = Role::kIdle;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (roles_[i] == Role::kFrozen || used_map_[i] != 0) continue;
    roles_[i] = Role::kUnused;
    fewer = true;
  }
  return fewer;
}

}  // namespace ddp
