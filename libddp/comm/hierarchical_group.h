// The backend that needs nothing but host memory: ranks of one node reduce in memory that they share, and nodes
// exchange messages.
#ifndef LIBDDP_COMM_HIERARCHICAL_GROUP_H_
#define LIBDDP_COMM_HIERARCHICAL_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/progress_thread.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/memory/shared_segment.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

struct GroupOptions {
  absl::Duration timeout;               // of the group's operations
  absl::Time deadline;                  // all ranks have come by then
  absl::Duration stall_warning;         // how long an operation waits before a warning says for whom; zero: none
  ProgressThread* progress = nullptr;   // outlives the group
  ContextObserver* observer = nullptr;  // outlives the group; may be null
};

// Collective over the rendezvous, which is not used after the call. Unimplemented, naming the hosts and
// the remedy, where there are several nodes and nothing carries messages between them; otherwise errors as those of
// SharedSegment and Rendezvous, the same on all ranks.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateHierarchicalGroup(Rendezvous& rendezvous,
                                                                      const GroupOptions& options);

// The group of ranks of one node that share `memory`, of HierarchicalBytes(options.size) bytes; options.control and
// options.allocations are set here. `allocation_numbers`: how many allocations there may be at a time.
size_t HierarchicalBytes(int ranks);
std::unique_ptr<ProcessGroup> MakeHierarchicalGroup(std::shared_ptr<SharedSegment> memory, EngineOptions options,
                                                    ProgressThread* progress,
                                                    uint64_t allocation_numbers = Address::kAllocations);

}  // namespace ddp

#endif  // LIBDDP_COMM_HIERARCHICAL_GROUP_H_
