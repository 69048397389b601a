// The backend that needs nothing but host memory: ranks of one host reduce in memory that they share.
#ifndef LIBDDP_COMM_HIERARCHICAL_GROUP_H_
#define LIBDDP_COMM_HIERARCHICAL_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/comm/context_observer.h"
#include "libddp/comm/progress_thread.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

struct GroupOptions {
  absl::Duration timeout;               // of the group's operations
  absl::Time deadline;                  // all ranks have come by then
  absl::Duration stall_warning;         // how long an operation waits before a warning says for whom; zero: none
  ProgressThread* progress = nullptr;   // outlives the group
  ContextObserver* observer = nullptr;  // outlives the group; may be null
};

// Collective over the rendezvous, which is not used after the call. Unimplemented, naming the hosts, where the ranks
// are not all on one; otherwise errors as those of SharedSegment and Rendezvous, the same on all ranks.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateHierarchicalGroup(Rendezvous& rendezvous,
                                                                      const GroupOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_HIERARCHICAL_GROUP_H_
