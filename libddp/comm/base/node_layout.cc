// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/node_layout.h"

#include <algorithm>
#include <map>

namespace ddp {

int NodeLayout::widest() const {
  int most = 0;
  for (int n = 0; n < nodes(); ++n) most = std::max(most, width(n));
  return most;
}

int NodeLayout::narrowest() const {
  int least = size();
  for (int n = 0; n < nodes(); ++n) least = std::min(least, width(n));
  return least;
}

NodeLayout CutIntoNodes(absl::Span<const std::string> hosts, int node_size) {
  NodeLayout layout;
  std::map<std::string, int> open;  // each host's node that has room for more ranks
  for (size_t r = 0; r < hosts.size(); ++r) {
    const auto [at, is_new] = open.try_emplace(hosts[r], layout.nodes());
    if (!is_new && node_size > 0 && layout.width(at->second) == node_size) at->second = layout.nodes();
    if (at->second == layout.nodes()) layout.ranks.emplace_back();
    layout.node.push_back(at->second);
    layout.local.push_back(layout.width(at->second));
    layout.ranks[static_cast<size_t>(at->second)].push_back(static_cast<int>(r));
  }
  return layout;
}

}  // namespace ddp
