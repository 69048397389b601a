// SPDX-License-Identifier: Apache-2.0
#include "ddp/sync_state.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "libddp/comm/base/exchange.h"

namespace ddp {

namespace {

// The step of a rank whose state is no step's.
constexpr int64_t kSpoiled = std::numeric_limits<int64_t>::max();

bool OnGpu(const Buffer& buffer) { return buffer.device.kind == Device::Kind::kCuda; }

}  // namespace

absl::StatusOr<int64_t> SyncState(ProcessGroup& group, int64_t& step, Buffers state) {
  absl::StatusOr<std::vector<int64_t>> steps = Exchange(group, step);
  if (!steps.ok()) return steps.status();
  const auto lowest = std::min_element(steps->begin(), steps->end());
  const int root = static_cast<int>(lowest - steps->begin());
  if (*lowest == kSpoiled) {
    return absl::DataLossError(
        "no rank has the state of a step any more: each was receiving it when a group failed; start from a checkpoint");
  }
  // If the group fails now, this rank may have a part of the root's state: of the same step that is what it had, but a
  // GPU may have received anything.
  const bool receives = group.rank() != root && (step > *lowest || std::any_of(state.begin(), state.end(), OnGpu));
  if (receives) step = kSpoiled;
  // A broadcast is of one dtype, and of memory of one kind.
  std::vector<Buffer> left(state.begin(), state.end());
  while (!left.empty()) {
    const Buffer first = left.front();
    const auto others = std::stable_partition(
        left.begin(), left.end(), [&](const Buffer& b) { return b.dtype == first.dtype && b.device == first.device; });
    const auto same = absl::MakeConstSpan(left.data(), static_cast<size_t>(others - left.begin()));
    if (absl::Status s = group.Broadcast(same, root, kNoStream).Wait(); !s.ok()) return s;
    left.erase(left.begin(), others);
  }
  return step = *lowest;
}

}  // namespace ddp
