// The hierarchical backend where ranks are on several nodes.
#ifndef LIBDDP_COMM_MULTI_NODE_GROUP_H_
#define LIBDDP_COMM_MULTI_NODE_GROUP_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/hierarchical_group.h"
#include "libddp/comm/introduction.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

// Collective over the rendezvous, which is not used after the call; `all` are the introductions of its ranks, and the
// layout, of two nodes or more, that of CreateHierarchicalGroup, whose errors apply.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateMultiNodeGroup(Rendezvous& rendezvous,
                                                                   const std::vector<Introduction>& all,
                                                                   NodeLayout layout, const GroupOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_MULTI_NODE_GROUP_H_
