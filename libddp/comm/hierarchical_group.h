// The backend that needs nothing but host memory: ranks of one host reduce in memory that they share.
#ifndef LIBDDP_COMM_HIERARCHICAL_GROUP_H_
#define LIBDDP_COMM_HIERARCHICAL_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/comm/progress_thread.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

// Collective over the rendezvous, which is not used after the call. All ranks have come by `deadline`; `timeout` is
// that of the group's operations. `progress` outlives the group. Unimplemented, naming the hosts, where the ranks are
// not all on one; otherwise errors as those of SharedSegment and Rendezvous, the same on all ranks.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateHierarchicalGroup(Rendezvous& rendezvous, absl::Duration timeout,
                                                                      absl::Time deadline, ProgressThread* progress);

}  // namespace ddp

#endif  // LIBDDP_COMM_HIERARCHICAL_GROUP_H_
