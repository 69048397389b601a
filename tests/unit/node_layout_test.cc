// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/node_layout.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "libddp/comm/nodes/block_plan.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

using Nodes = std::vector<std::vector<int>>;

TEST_CASE("a host is a node, wherever its ranks are in the order") {
  CHECK(CutIntoNodes(std::vector<std::string>{"a", "a", "b", "b"}, 0).ranks == Nodes{{0, 1}, {2, 3}});
  const NodeLayout dealt = CutIntoNodes(std::vector<std::string>{"b", "a", "b", "a", "b"}, 0);
  CHECK(dealt.ranks == Nodes{{0, 2, 4}, {1, 3}});
  CHECK(dealt.node == std::vector<int>{0, 1, 0, 1, 0});
  CHECK(dealt.local == std::vector<int>{0, 0, 1, 1, 2});
  CHECK(dealt.widest() == 3);
}

TEST_CASE("a node size cuts every host, the rest being a smaller node") {
  CHECK(CutIntoNodes(std::vector<std::string>(5, "a"), 2).ranks == Nodes{{0, 1}, {2, 3}, {4}});
  CHECK(CutIntoNodes(std::vector<std::string>(3, "a"), 1).ranks == Nodes{{0}, {1}, {2}});
  CHECK(CutIntoNodes(std::vector<std::string>(3, "a"), 8).ranks == Nodes{{0, 1, 2}});
  CHECK(CutIntoNodes(std::vector<std::string>{"a", "b", "a", "a", "b"}, 2).ranks == Nodes{{0, 2}, {1, 4}, {3}});
}

NodeLayout WithWidths(const std::vector<int>& widths) {
  std::vector<std::string> hosts;
  for (size_t n = 0; n < widths.size(); ++n)
    hosts.insert(hosts.end(), static_cast<size_t>(widths[n]), std::to_string(n));
  return CutIntoNodes(hosts, 0);
}

const std::vector<std::vector<int>> kWidths = {{1, 1},    {2, 2}, {2, 1}, {1, 2},       {3, 2, 4},
                                               {4, 4, 4}, {7, 3}, {1, 5}, {2, 2, 2, 1}, {8, 8}};

// What any plan must be: on each node every block has one owner, in whose slice it is.
void CheckOwners(const NodeLayout& layout, const BlockPlan& plan) {
  for (int n = 0; n < layout.nodes(); ++n) {
    std::set<int> seen;
    int longest = 0;
    for (int l = 0; l < layout.width(n); ++l) {
      const std::vector<int>& slice = plan.slice(n, l);
      longest = std::max(longest, static_cast<int>(slice.size()));
      CHECK(std::is_sorted(slice.begin(), slice.end()));
      for (const int b : slice) {
        CHECK(plan.owner(n, b) == layout.rank(n, l));
        CHECK(seen.insert(b).second);
      }
    }
    CHECK(seen.size() == static_cast<size_t>(plan.blocks()));
    CHECK(plan.slots(n) == longest);
  }
  std::map<int, int> rooted;
  int most = 0;
  for (int b = 0; b < plan.blocks(); ++b) most = std::max(most, ++rooted[plan.root(b)]);
  CHECK(plan.most_rooted() == most);
}

TEST_CASE("a block may have a root on each node, its owner there") {
  for (const std::vector<int>& widths : kWidths) {
    const NodeLayout layout = WithWidths(widths);
    int most = 0;
    for (int n = 0; n < layout.nodes(); ++n) most = std::max(most, BlockPlan::OnEachNode(layout, n).slots(n));
    for (int n = 0; n < layout.nodes(); ++n) {
      const BlockPlan plan = BlockPlan::OnEachNode(layout, n);
      CHECK(plan.on_each_node());
      CHECK(plan.blocks() == layout.widest());
      for (int b = 0; b < plan.blocks(); ++b) {
        CHECK(layout.node_of(plan.root(b)) == n);
        CHECK(plan.root(b) == plan.owner(n, b));
        CHECK(plan.owner(n, b) == BlockPlan::OnEachNode(layout, 0).owner(n, b));
      }
      // The same for all, who all have to cut their scratch memory alike.
      CHECK(plan.most_rooted() == most);
    }
  }
  CHECK_FALSE(BlockPlan::Even(WithWidths({2, 2})).on_each_node());
}

TEST_CASE("the root of every block of an all-reduce is one of its owners, and all nodes have as many") {
  for (const std::vector<int>& widths : kWidths) {
    const NodeLayout layout = WithWidths(widths);
    const BlockPlan plan = BlockPlan::Even(layout);
    CheckOwners(layout, plan);
    std::vector<int> roots(static_cast<size_t>(layout.nodes()));
    for (int b = 0; b < plan.blocks(); ++b) {
      const int n = layout.node_of(plan.root(b));
      CHECK(plan.owner(n, b) == plan.root(b));
      ++roots[static_cast<size_t>(n)];
    }
    CHECK(roots == std::vector<int>(roots.size(), layout.widest()));
    // No rank of a node has much more than another.
    for (int n = 0; n < layout.nodes(); ++n) {
      for (int l = 0; l < layout.width(n); ++l) {
        CHECK(static_cast<int>(plan.slice(n, l).size()) + layout.nodes() >= plan.slots(n));
      }
    }
  }
}

TEST_CASE("with equal nodes a rank owns the blocks of its local rank everywhere, and is the root of one") {
  const NodeLayout layout = WithWidths({3, 3});
  const BlockPlan plan = BlockPlan::Even(layout);
  CHECK(plan.most_rooted() == 1);
  for (int b = 0; b < plan.blocks(); ++b) {
    CHECK(layout.local_of(plan.owner(0, b)) == layout.local_of(plan.owner(1, b)));
  }
  CHECK(plan.slice(0, 1) == std::vector<int>{2, 3});  // neighbours: one range of the array
}

TEST_CASE("a rank owns its own block of a reduce-scatter or all-gather") {
  for (const std::vector<int>& widths : kWidths) {
    const NodeLayout layout = WithWidths(widths);
    const BlockPlan plan = BlockPlan::PerRank(layout);
    CheckOwners(layout, plan);
    CHECK(plan.blocks() == layout.size());
    for (int r = 0; r < layout.size(); ++r) {
      CHECK(plan.root(r) == r);
      CHECK(plan.owner(layout.node_of(r), r) == r);
    }
  }
}

TEST_CASE("a broadcast starts at its root and ends at every rank's share") {
  for (const std::vector<int>& widths : kWidths) {
    const NodeLayout layout = WithWidths(widths);
    for (int root = 0; root < layout.size(); ++root) {
      const BlockPlan plan = BlockPlan::FromRoot(layout, root);
      CheckOwners(layout, plan);
      CHECK(plan.most_rooted() == plan.blocks());
      CHECK(plan.root(0) == root);
    }
  }
}

}  // namespace
}  // namespace ddp
