// SPDX-License-Identifier: Apache-2.0
// Which ranks share memory with which: the nodes of a group.
#ifndef LIBDDP_COMM_BASE_NODE_LAYOUT_H_
#define LIBDDP_COMM_BASE_NODE_LAYOUT_H_

#include <string>
#include <vector>

#include "absl/types/span.h"

namespace ddp {

// A plain value. Nodes are numbered by their first rank; the ranks of a node ascend, and are its local ranks 0, 1, ...
struct NodeLayout {
  std::vector<std::vector<int>> ranks;  // by node, then by local rank
  std::vector<int> node;                // by rank
  std::vector<int> local;               // by rank: its local rank

  int nodes() const { return static_cast<int>(ranks.size()); }
  int size() const { return static_cast<int>(node.size()); }
  int width(int n) const { return static_cast<int>(ranks[static_cast<size_t>(n)].size()); }
  int widest() const;
  int narrowest() const;
  int rank(int n, int l) const { return ranks[static_cast<size_t>(n)][static_cast<size_t>(l)]; }
  int node_of(int r) const { return node[static_cast<size_t>(r)]; }
  int local_of(int r) const { return local[static_cast<size_t>(r)]; }
};

// The layout where `hosts` names each rank's host. node_size > 0: ranks of a host are cut into nodes of so many, the
// last one perhaps smaller; 0: a host is a node.
NodeLayout CutIntoNodes(absl::Span<const std::string> hosts, int node_size);

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_NODE_LAYOUT_H_
