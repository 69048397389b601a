// SPDX-License-Identifier: Apache-2.0
// How the data of an operation is dealt out over several nodes. Pure functions of the node layout.
//
// The data is a number of blocks. A block has one root: the rank that has, or makes, its final value. On each node one
// rank owns it: the owner holds the node's partial sum, and receives the final value. Nothing else crosses between
// nodes. The blocks that a rank owns, in ascending order, are its slice.
//
// So with equal nodes a rank talks to the ranks of the other nodes that have its own local rank, all ranks alike, and
// every link of every node carries the same load.
#ifndef LIBDDP_COMM_NODES_BLOCK_PLAN_H_
#define LIBDDP_COMM_NODES_BLOCK_PLAN_H_

#include <cstddef>
#include <vector>

#include "libddp/comm/base/node_layout.h"

namespace ddp {

class BlockPlan {
 public:
  // All-reduce: each local rank's share of the array is cut into one block per node. Where nodes differ in size there
  // are as many shares as the largest has ranks, dealt out evenly over the ranks of the smaller ones.
  static BlockPlan Even(const NodeLayout& layout);
  // All-reduce where one exchange costs less than two: a block for each share, with a root on every node, its owner
  // there. So it looks from `node`.
  static BlockPlan OnEachNode(const NodeLayout& layout, int node);
  // Reduce-scatter, all-gather: block r is rank r's own.
  static BlockPlan PerRank(const NodeLayout& layout);
  // Broadcast: as many blocks as the largest node has ranks, all with the root `root`.
  static BlockPlan FromRoot(const NodeLayout& layout, int root);

  int blocks() const { return static_cast<int>(roots_.size()); }
  int root(int block) const { return roots_[static_cast<size_t>(block)]; }
  // The rank (of the group) that owns the block on a node.
  int owner(int node, int block) const { return owner_[static_cast<size_t>(node)][static_cast<size_t>(block)]; }
  // The blocks that local rank `local` of a node owns, ascending.
  const std::vector<int>& slice(int node, int local) const {
    return slices_[static_cast<size_t>(node)][static_cast<size_t>(local)];
  }
  // Blocks of the largest slice of a node: all its slices have room for so many.
  int slots(int node) const { return slots_[static_cast<size_t>(node)]; }
  // The most blocks that have the same root, whichever rank that is.
  int most_rooted() const { return most_rooted_; }
  // Whether blocks have a root on each node: nobody sends their final values to other nodes.
  bool on_each_node() const { return on_each_node_; }

 private:
  template <typename Root, typename Owner>
  BlockPlan(const NodeLayout& layout, int blocks, Root root, Owner local_owner);

  std::vector<int> roots_;
  std::vector<std::vector<int>> owner_;                // by node, block
  std::vector<std::vector<std::vector<int>>> slices_;  // by node, local rank
  std::vector<int> slots_;                             // by node
  int most_rooted_ = 0;
  bool on_each_node_ = false;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_BLOCK_PLAN_H_
