// SPDX-License-Identifier: Apache-2.0
#include "ddp/sync_state.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/validate.h"

namespace ddp {

namespace {

// The step of a rank whose state is no step's.
constexpr int64_t kSpoiled = std::numeric_limits<int64_t>::max();

bool OnGpu(const Buffer& buffer) { return buffer.device.kind == Device::Kind::kCuda; }

// A broadcast is of one dtype, and of memory of one kind.
std::vector<std::vector<Buffer>> InParts(Buffers state) {
  std::vector<std::vector<Buffer>> parts;
  for (const Buffer& b : state) {
    const auto known = std::find_if(parts.begin(), parts.end(), [&](const std::vector<Buffer>& part) {
      return part[0].dtype == b.dtype && part[0].device == b.device;
    });
    (known == parts.end() ? parts.emplace_back() : *known).push_back(b);
  }
  return parts;
}

// What the broadcasts would refuse on this rank alone.
absl::Status Check(const ProcessGroup& group, const std::vector<std::vector<Buffer>>& parts) {
  const WorldRanks world_ranks = WorldRanksOf(group);
  for (const std::vector<Buffer>& part : parts) {
    const Device device = OnGpu(part[0]) ? group.device() : Device{};
    Extent in, out;
    const absl::Status status =
        CallCheck(group.rank(), group.size(), "sync_state", device, &world_ranks)
            .Arguments({.kind = Call::Kind::kBroadcast, .in = part, .out = part, .after = kNoStream}, &in, &out);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> SyncState(ProcessGroup& group, int64_t& step, Buffers state) {
  const std::vector<std::vector<Buffer>> parts = InParts(state);
  struct Rank {
    int64_t step = 0;
    Note note = {};
  };
  const absl::StatusOr<std::vector<Rank>> ranks = Exchange(group, Rank{step, Note(Check(group, parts), "")});
  if (!ranks.ok()) return ranks.status();
  for (size_t r = 0; r < ranks->size(); ++r) {
    if (absl::Status s = (*ranks)[r].note.status(r); !s.ok()) return s;
  }
  const auto lowest =
      std::min_element(ranks->begin(), ranks->end(), [](const Rank& a, const Rank& b) { return a.step < b.step; });
  const int root = static_cast<int>(lowest - ranks->begin());
  if (lowest->step == kSpoiled) {
    return absl::DataLossError(
        "no rank has the state of a step any more: each was receiving it when a group failed; start from a checkpoint");
  }
  // If the group fails now, this rank may have a part of the root's state: of the same step that is what it had, but a
  // GPU may have received anything.
  const bool receives = group.rank() != root && (step > lowest->step || std::any_of(state.begin(), state.end(), OnGpu));
  if (receives) step = kSpoiled;
  for (const std::vector<Buffer>& part : parts) {
    if (absl::Status s = group.Broadcast(part, root, kNoStream).Wait(); !s.ok()) return s;
  }
  return step = lowest->step;
}

}  // namespace ddp
