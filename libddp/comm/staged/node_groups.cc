// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/node_groups.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/comm/base/exchange.h"

namespace ddp {
namespace {

// Null where `color` is negative.
absl::StatusOr<std::shared_ptr<InternalGroup>> Part(InternalGroup& control, int color, int key) {
  absl::StatusOr<std::unique_ptr<ProcessGroup>> part = control.SplitUnheard(color, key);
  if (!part.ok()) return part.status();
  std::shared_ptr<ProcessGroup> shared = *std::move(part);
  return std::dynamic_pointer_cast<InternalGroup>(std::move(shared));
}

}  // namespace

absl::StatusOr<std::unique_ptr<NodeGroups>> NodeGroups::Create(InternalGroup& control, const NodeLayout& layout) {
  if (absl::Status s = Agree(control, control.CheckBackground()); !s.ok()) return s;
  auto groups = std::make_unique<NodeGroups>();
  groups->layout = layout;
  const int rank = control.rank(), local = layout.local_of(rank), node = layout.node_of(rank);
  const auto part = [&](int color, int key, std::shared_ptr<InternalGroup>* group) -> absl::Status {
    absl::StatusOr<std::shared_ptr<InternalGroup>> made = Part(control, color, key);
    if (!made.ok()) return made.status();
    *group = *std::move(made);
    return absl::OkStatus();
  };
  if (absl::Status s = part(0, rank, &groups->all); !s.ok()) return s;
  if (absl::Status s = part(node, local, &groups->node); !s.ok()) return s;
  if (absl::Status s = part(local < layout.narrowest() ? local : -1, node, &groups->across); !s.ok()) return s;
  return groups;
}

absl::Status NodeGroups::FromAcross(const absl::Status& error) const {
  if (error.ok()) return error;
  std::vector<int> ranks;
  for (const int n : FailedRanks(error)) ranks.push_back(layout.rank(n, local()));
  const absl::Status named = across->world_ranks().Named(error, across->rank());
  return WithFailedRanks(absl::Status(named.code(), absl::StrCat(named.message(), " (between the nodes of GPUs)")),
                         ranks);
}

// The ranks to blame have other numbers in the parts.
void NodeGroups::Fail(const absl::Status& why) {
  const absl::Status unnumbered(why.code(), why.message());
  if (all != nullptr) all->Fail(why);
  if (across != nullptr) across->Fail(unnumbered);
  if (node != nullptr) node->Fail(unnumbered);
}

}  // namespace ddp
