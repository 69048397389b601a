// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nodes/block_plan.h"

#include <algorithm>

namespace ddp {

template <typename Root, typename Owner>
BlockPlan::BlockPlan(const NodeLayout& layout, int blocks, Root root, Owner local_owner) {
  std::vector<int> rooted(static_cast<size_t>(layout.size()));
  for (int n = 0; n < layout.nodes(); ++n) {
    owner_.emplace_back();
    slices_.emplace_back(static_cast<size_t>(layout.width(n)));
    slots_.push_back(0);
    for (int b = 0; b < blocks; ++b) {
      const int local = local_owner(n, b);
      std::vector<int>& slice = slices_.back()[static_cast<size_t>(local)];
      slice.push_back(b);
      owner_.back().push_back(layout.rank(n, local));
      slots_.back() = std::max(slots_.back(), static_cast<int>(slice.size()));
    }
  }
  for (int b = 0; b < blocks; ++b) {
    roots_.push_back(root(b));
    most_rooted_ = std::max(most_rooted_, ++rooted[static_cast<size_t>(roots_.back())]);
  }
}

BlockPlan BlockPlan::Even(const NodeLayout& layout) {
  const int shares = layout.widest(), nodes = layout.nodes();
  const auto local_owner = [&](int n, int b) { return b / nodes * layout.width(n) / shares; };
  return BlockPlan(
      layout, shares * nodes, [&](int b) { return layout.rank(b % nodes, local_owner(b % nodes, b)); }, local_owner);
}

BlockPlan BlockPlan::OnEachNode(const NodeLayout& layout, int node) {
  const int shares = layout.widest();
  const auto local_owner = [&](int n, int b) { return b * layout.width(n) / shares; };
  BlockPlan plan(
      layout, shares, [&](int b) { return layout.rank(node, local_owner(node, b)); }, local_owner);
  plan.most_rooted_ = *std::max_element(plan.slots_.begin(), plan.slots_.end());
  plan.on_each_node_ = true;
  return plan;
}

BlockPlan BlockPlan::PerRank(const NodeLayout& layout) {
  return BlockPlan(
      layout, layout.size(), [](int b) { return b; },
      [&](int n, int b) { return layout.local_of(b) * layout.width(n) / layout.width(layout.node_of(b)); });
}

BlockPlan BlockPlan::FromRoot(const NodeLayout& layout, int root) {
  const int shares = layout.widest();
  return BlockPlan(
      layout, shares, [&](int) { return root; }, [&](int n, int b) { return b * layout.width(n) / shares; });
}

}  // namespace ddp
