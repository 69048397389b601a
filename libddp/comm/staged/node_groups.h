// SPDX-License-Identifier: Apache-2.0
// The groups on CPU memory by which GPUs of several nodes work together.
#ifndef LIBDDP_COMM_STAGED_NODE_GROUPS_H_
#define LIBDDP_COMM_STAGED_NODE_GROUPS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/node_layout.h"

namespace ddp {

// An array that is reduced on each node is divided into as many shares as the smallest node has ranks: local rank s has
// share s. On a larger node the others have none. The smallest node's ranks set the pace: with more shares, which they
// would have to take on, nothing would end sooner.
struct NodeGroups {
  // Collective over `control`, whose ranks are on the nodes of `layout`. If a rank fails, all do. FailedPrecondition if
  // a thread of the library's own cannot use MPI here.
  static absl::StatusOr<std::unique_ptr<NodeGroups>> Create(InternalGroup& control, const NodeLayout& layout);

  int rank() const { return all->rank(); }
  int size() const { return all->size(); }
  int node_index() const { return layout.node_of(rank()); }
  int local() const { return layout.local_of(rank()); }
  int width() const { return layout.width(node_index()); }  // ranks of this node
  int shares() const { return layout.narrowest(); }

  // `error` of an operation in `across`, with the ranks to blame as `all` numbers them.
  absl::Status FromAcross(const absl::Status& error) const;
  // Ends what runs in these groups.
  void Fail(const absl::Status& why);

  NodeLayout layout;
  std::shared_ptr<InternalGroup> all;     // what `control` is, with an order of operations of its own
  std::shared_ptr<InternalGroup> node;    // this node's ranks, by local rank
  std::shared_ptr<InternalGroup> across;  // rank n: the one of node n that has the same share; null if this has none
};

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_NODE_GROUPS_H_
