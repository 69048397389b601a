// SPDX-License-Identifier: Apache-2.0
// A process group that hands every call on to another: what a test changes, it overrides.
#ifndef TESTS_SUPPORT_FORWARDING_GROUP_H_
#define TESTS_SUPPORT_FORWARDING_GROUP_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "ddp/observer.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/internal_group.h"

namespace ddp::testing {

class ForwardingGroup : public InternalGroup {
 public:
  explicit ForwardingGroup(ProcessGroup& group) : group_(group) {}

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  absl::string_view backend() const override { return group_.backend(); }
  Device device() const override { return group_.device(); }
  const uint32_t* failed_word() const override { return group_.failed_word(); }
  Work Start(const Call& call) override { return group_.Start(call); }
  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override { return group_.Allocate(bytes, device); }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) override { return group_.Split(color, key); }
  absl::Status Register(const Allocation& memory) override { return group_.Register(memory); }
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const override {
    return FindAllocation(group_, data, bytes);
  }
  void Abort(absl::Status why) override { group_.Abort(std::move(why)); }
  absl::Status SetTimeout(absl::Duration timeout) override { return group_.SetTimeout(timeout); }
  absl::Duration timeout() const override { return group_.timeout(); }
  absl::Status status() const override { return group_.status(); }
  void Progress() override { group_.Progress(); }
  Observer* observer() const override { return ObserverOf(group_); }
  const WorldRanks& world_ranks() const override { return world_ranks_; }
  void Fail(const absl::Status& why) override { group_.Abort(why); }

 private:
  ProcessGroup& group_;
  const WorldRanks world_ranks_ = WorldRanksOf(group_);
};

// A group in the background of which MPI cannot be used.
class Foreground final : public ForwardingGroup {
 public:
  explicit Foreground(std::unique_ptr<ProcessGroup> group) : ForwardingGroup(*group), group_(std::move(group)) {}
  const NodeLayout* layout() const override { return dynamic_cast<InternalGroup&>(*group_).layout(); }
  absl::Status CheckBackground() override { return absl::FailedPreconditionError("not in the background"); }

 private:
  const std::unique_ptr<ProcessGroup> group_;
};

// Fails on all ranks before a call, when those before it are done. `meet`: all ranks wait for each other.
class FailingGroup final : public ForwardingGroup {
 public:
  FailingGroup(ProcessGroup& group, std::function<bool(const Call&)> before, std::function<void()> meet)
      : ForwardingGroup(group), before_(std::move(before)), meet_(std::move(meet)) {}
  Work Start(const Call& call) override {
    if (status().ok() && before_(call)) {
      meet_();
      Abort(absl::AbortedError("a rank is gone"));
    }
    return ForwardingGroup::Start(call);
  }

 private:
  const std::function<bool(const Call&)> before_;
  const std::function<void()> meet_;
};

// A Work of the test's own. Derive, and hand out Work(new ...).
class TestWork : public internal::WorkState {
 public:
  absl::Status BlockStream(Stream) override { return Wait(absl::InfiniteFuture()); }
  void Ref() override { ++refs_; }
  void Unref() override {
    if (--refs_ == 0) delete this;
  }

 protected:
  ~TestWork() override = default;

 private:
  std::atomic<int> refs_{1};
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FORWARDING_GROUP_H_
