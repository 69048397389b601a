// SPDX-License-Identifier: Apache-2.0
// The backend that needs only host memory: the ranks of a node reduce in memory that they share, and nodes exchange
// messages.
#ifndef LIBDDP_COMM_HIERARCHICAL_GROUP_H_
#define LIBDDP_COMM_HIERARCHICAL_GROUP_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/base/progress_thread.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/health/peer_watch.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/introduction.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/memory/group_memory.h"
#include "libddp/comm/memory/shared_segment.h"
#include "libddp/comm/nodes/node_wire.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

struct GroupOptions {
  WorldRanks world_ranks = {};
  absl::Duration timeout;               // of the group's operations
  absl::Time deadline;                  // all ranks have come by then; making the group may take a little longer
  absl::Duration stall_warning;         // how long an operation waits before a warning says for whom; zero: none
  ProgressThread* progress = nullptr;   // outlives the group
  ContextObserver* observer = nullptr;  // outlives the group; may be null
};

// Collective over the rendezvous, which is not used after the call. Unimplemented, naming the hosts and
// the remedy, where there are several nodes and nothing carries messages between them; otherwise errors as those of
// SharedSegment and Rendezvous, the same on all ranks.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateHierarchicalGroup(Rendezvous& rendezvous,
                                                                      const GroupOptions& options);

// Another group of the ranks of `group`, which CreateHierarchicalGroup has made for two or more; with an observer of
// its own. Collective.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateGroupOfSameRanks(ProcessGroup& group, ContextObserver* observer);

// What the ranks of a group know of each other.
struct Members {
  int rank = 0;                   // this process's
  std::vector<Introduction> all;  // by rank
  NodeLayout layout;
  bool oversubscribed = false;
  PeerWatch peers = {};  // over those of this node

  int local() const { return layout.local_of(rank); }
  const std::vector<int>& node() const { return layout.ranks[static_cast<size_t>(layout.node_of(rank))]; }
};

// What groups of one node (HostGroup) and of several (MultiNodeGroup) have in common.
class HierarchicalGroup : public CheckedGroup {
 public:
  int rank() const final { return members_.rank; }
  int size() const final { return members_.layout.size(); }
  absl::string_view backend() const final { return "hierarchical"; }

  absl::Status Register(const Allocation& memory) final {
    std::lock_guard<std::mutex> lock(exchange_mutex_);
    return memory_.Register(memory);
  }
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const final {
    return allocations_.Find(data, bytes);
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) final {
    return SplitWith(color, key, options_);
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key, ContextObserver* observer) {
    GroupOptions options = options_;
    options.observer = observer;
    return SplitWith(color, key, std::move(options));
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> SplitUnheard(int color, int key) final;
  const NodeLayout* layout() const final { return &members_.layout; }
  absl::Status CheckBackground() final;

 protected:
  // `allocation_numbers`, `viewed`: see AllocationTable, GroupMemory.
  HierarchicalGroup(Members members, const GroupOptions& options, uint64_t allocation_numbers, bool viewed)
      : CheckedGroup(options.timeout, options.world_ranks),
        members_(std::move(members)),
        options_(options),
        allocations_(members_.local(), allocation_numbers),
        memory_(this, members_.node(), &allocations_, viewed) {}

  // Of an engine of this node's ranks, with its control block in the segment at `offset`.
  EngineOptions EngineAt(const SharedSegment& segment, size_t offset, const GroupOptions& options);
  // What events call this group, of those of its Context.
  static uint64_t GroupNumber(const GroupOptions& options) {
    return options.observer == nullptr ? 0 : options.observer->AddGroup();
  }
  virtual NodeWire* wire() { return nullptr; }  // null in a group of one node

  const Members members_;
  const GroupOptions options_;
  AllocationTable allocations_;

 private:
  // `options`: of the new group.
  absl::StatusOr<std::unique_ptr<ProcessGroup>> SplitWith(int color, int key, GroupOptions options);
  absl::StatusOr<Allocation> AllocateHere(size_t bytes) final {
    std::lock_guard<std::mutex> lock(exchange_mutex_);
    return memory_.Allocate(bytes);
  }

  std::mutex exchange_mutex_;  // one Allocate, Register or Split at a time
  GroupMemory memory_;
};

// The two kinds. `segment` has so many bytes, for the `ranks` of this node. That of several nodes has
// NodeScratch::kBytes more for each of them, which it reserves itself.
size_t HostGroupBytes(int ranks);
std::unique_ptr<ProcessGroup> MakeHostGroup(Members members, std::shared_ptr<SharedSegment> segment,
                                            const GroupOptions& options,
                                            uint64_t allocation_numbers = Address::kAllocations);
size_t MultiNodeGroupBytes(int ranks);
std::unique_ptr<ProcessGroup> MakeMultiNodeGroup(Members members, const std::shared_ptr<SharedSegment>& segment,
                                                 const GroupOptions& options, std::unique_ptr<NodeWire> wire);

}  // namespace ddp

#endif  // LIBDDP_COMM_HIERARCHICAL_GROUP_H_
