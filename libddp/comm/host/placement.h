// SPDX-License-Identifier: Apache-2.0
// How the data of an operation travels between the ranks of a host, and why: every size from which one way is faster
// than another is here. Pure functions.
#ifndef LIBDDP_COMM_HOST_PLACEMENT_H_
#define LIBDDP_COMM_HOST_PLACEMENT_H_

#include <cstddef>

#include "absl/types/span.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/host/control_block.h"

namespace ddp {

// What decides about one rank's data of one operation.
struct PlacementFacts {
  OperationKey::Kind kind = OperationKey::Kind::kBarrier;
  int ranks = 1;
  bool oversubscribed = false;  // there are more ranks than processors
  bool is_root = false;
  size_t in_bytes = 0, out_bytes = 0;
  size_t in_ranges = 0, out_ranges = 0;
  bool in_place = false;       // all-to-all: `in` and `out` overlap
  bool shared = false;         // all ranks reach all of it; only where CanBeShared
  bool readable = false;       // the peers are other processes, which can read this one's memory
  bool has_large_row = false;  // the ring has room for inline data of more than kInlineBytes
};

// Whether it matters if all ranks can reach the data.
bool CanBeShared(const PlacementFacts& facts);
Placement ChoosePlacement(const PlacementFacts& facts);

// How all ranks execute an operation. Each of them computes the same from the announcements.
enum class Route {
  kInline,   // data travels with the announcements; each rank computes its own result
  kDirect,   // all data lies in shared memory: results are computed in place, by whichever rank has time
  kFetched,  // each rank reads what it needs from the peers' processes
  kStaged,   // data is copied through shared memory in rounds
};
// `placements`: by rank. `root`: of a broadcast; -1 for other operations.
Route ChooseRoute(absl::Span<const Placement> placements, int root);

// A message of at most so many bytes is copied into shared memory when it is sent; the sender need not wait.
size_t MaxEagerBytes(bool shared, bool oversubscribed);

}  // namespace ddp

#endif  // LIBDDP_COMM_HOST_PLACEMENT_H_
