// SPDX-License-Identifier: Apache-2.0
// What the library's groups offer one another and the layers above, beyond what programs see.
#ifndef LIBDDP_COMM_BASE_INTERNAL_GROUP_H_
#define LIBDDP_COMM_BASE_INTERNAL_GROUP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/observer.h"
#include "ddp/process_group.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/base/world_ranks.h"

namespace ddp {

// A place inside an allocation of a group.
struct AllocatedRange {
  Allocation memory = {};
  uint64_t number = 0;  // the allocation's number in its group; the same on all ranks
  size_t offset = 0;    // bytes from the start of the memory
};

// Ranks of other nodes that take no part any more, as far as is known.
struct AbsentRanks {
  std::vector<int> left;    // in good order
  std::vector<int> silent;  // have not answered
  std::string where;        // those that are silent: "rank 2 on node 1 (host b, rank 2, 3)"
};

class InternalGroup : public ProcessGroup {
 public:
  // As Abort, except that `why` itself becomes the cause of failure. Any thread.
  virtual void Fail(const absl::Status& why) = 0;

  // The allocation that contains all of [data, data + bytes), if it is from this group's Allocate or was passed to its
  // Register, and still has an owner.
  virtual std::optional<AllocatedRange> Find(const void* data, size_t bytes) const = 0;

  // Receives this group's events; null if there is none.
  virtual Observer* observer() const = 0;

  virtual const WorldRanks& world_ranks() const = 0;

  // Which ranks are on one node; null: all.
  virtual const NodeLayout* layout() const { return nullptr; }

  // Who of the other nodes is absent. The first call asks them all, and they are silent until they answer: a process
  // that lives does so within kAnswerNs. Never waits. Empty where nobody can be asked. Any thread.
  virtual AbsentRanks AskNodes() { return {}; }

  // The ranks whose processes have ended, as far as they can be watched from here; not those that had left in good
  // order. Never waits. Any thread.
  virtual std::vector<int> Dead() const { return {}; }

  // Split, but nobody hears of the new group's operations, which are parts of this one's.
  virtual absl::StatusOr<std::unique_ptr<ProcessGroup>> SplitUnheard(int color, int key) { return Split(color, key); }

  // InvalidArgument, with the reason, if operations cannot be captured into a CUDA graph; the same on all ranks.
  virtual absl::Status MayBeCaptured() const { return absl::OkStatus(); }

  // FailedPrecondition if a thread of the library's own must not wait for the group's operations.
  virtual absl::Status CheckBackground() { return absl::OkStatus(); }
};

// The same of any group. One that the program has written knows no allocations and no world, and has no observer.
inline std::optional<AllocatedRange> FindAllocation(const ProcessGroup& group, const void* data, size_t bytes) {
  const auto* const known = dynamic_cast<const InternalGroup*>(&group);
  return known == nullptr ? std::nullopt : known->Find(data, bytes);
}
inline Observer* ObserverOf(const ProcessGroup& group) {
  const auto* const known = dynamic_cast<const InternalGroup*>(&group);
  return known == nullptr ? nullptr : known->observer();
}
inline absl::Status CheckBackground(ProcessGroup& group) {
  auto* const known = dynamic_cast<InternalGroup*>(&group);
  return known == nullptr ? absl::OkStatus() : known->CheckBackground();
}
inline absl::Status MayBeCaptured(const ProcessGroup& group) {
  const auto* const known = dynamic_cast<const InternalGroup*>(&group);
  return known == nullptr ? absl::OkStatus() : known->MayBeCaptured();
}
inline WorldRanks WorldRanksOf(const ProcessGroup& group) {
  const auto* const known = dynamic_cast<const InternalGroup*>(&group);
  return known == nullptr ? WorldRanks() : known->world_ranks();
}
// `error`, of `call` in this group, with its ranks here and in the world.
inline absl::Status NameRank(const ProcessGroup& group, absl::string_view call, const absl::Status& error) {
  return error.ok() ? error : WorldRanksOf(group).Named(NameRank(group.rank(), call, error), group.rank());
}

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_INTERNAL_GROUP_H_
