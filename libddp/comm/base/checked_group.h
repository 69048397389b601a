// SPDX-License-Identifier: Apache-2.0
// The front end of every backend: checks the arguments of a call once, the same for all.
#ifndef LIBDDP_COMM_BASE_CHECKED_GROUP_H_
#define LIBDDP_COMM_BASE_CHECKED_GROUP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/joined_work.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/base/validate.h"
#include "libddp/device/cpu_reduce.h"

namespace ddp {

// A collective call whose arguments are right. What it refers to lives as long as the call.
struct CheckedCall {
  OperationKey key;
  ProgramCall called = {};  // `key`, or what this is a step of
  Buffers in, out;
  size_t count = 0;      // elements of `in`; of an all-gather with counts, of all ranks' inputs together; of a scatter,
                         // of `out`
  size_t out_count = 0;  // elements of `out`
  absl::Span<const size_t> counts = {};      // of each rank, in calls with counts
  absl::Span<const size_t> out_counts = {};  // all-to-all with counts; `counts` are those of `in`
  int to = 0, from = 0, tag = 0;             // send_recv
  const ReduceOptions* reduce = nullptr;     // of reductions
  CpuReduce kernel = {};                     // of reductions: does on the CPU what `reduce` asks for
  uint64_t parameters = 0;                   // a hash of what else all ranks must agree on: scales, counts
  Stream after = {};
  absl::Duration timeout = absl::InfiniteDuration();

  // With counts: where each rank's part begins, and at last the end; otherwise empty.
  std::vector<size_t> Begins() const;
};

// One Send or Recv whose arguments are right.
struct MessageCall {
  bool send;
  Buffers buffers;
  int peer, tag;
  Extent extent;
  Stream after = {};
  absl::Duration timeout = absl::InfiniteDuration();
};

class CheckedGroup : public InternalGroup {
 public:
  Work Start(const Call& call) final;
  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override;
  void Abort(absl::Status why) override;
  absl::Status SetTimeout(absl::Duration timeout) override;
  const WorldRanks& world_ranks() const final { return world_ranks_; }
  absl::Duration timeout() const final {
    const int64_t ns = timeout_ns_.load(std::memory_order_relaxed);
    return ns == std::numeric_limits<int64_t>::max() ? absl::InfiniteDuration() : absl::Nanoseconds(ns);
  }

 protected:
  CheckedGroup(absl::Duration timeout, WorldRanks world_ranks)
      : timeout_ns_(absl::ToInt64Nanoseconds(timeout)), world_ranks_(std::move(world_ranks)) {}

  virtual Work StartChecked(const CheckedCall& call) = 0;
  // An IsComposed call, made of others unless overridden. What only a root uses is empty elsewhere.
  virtual Work StartComposed(const CheckedCall& call);
  virtual Work StartMessage(const MessageCall& message) = 0;
  virtual absl::StatusOr<Allocation> AllocateHere(size_t bytes) = 0;  // on device()

  // The group that serves the memory of this call, if that is not this one; it checks the call.
  virtual ProcessGroup* Other(const Call& /*call*/) { return nullptr; }

  CallCheck Check(absl::string_view call) const { return {rank(), size(), call, device(), &world_ranks_}; }

 private:
  absl::Status SetReduce(const ReduceOptions& options, CheckedCall* call) const;

  std::atomic<int64_t> timeout_ns_;
  const WorldRanks world_ranks_;
  const std::shared_ptr<OrphanedMemory> orphans_ = std::make_shared<OrphanedMemory>();
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_CHECKED_GROUP_H_
