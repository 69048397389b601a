// SPDX-License-Identifier: Apache-2.0
// Creates a memory segment that the ranks of a node share.
#ifndef LIBDDP_COMM_MEMORY_SHARE_SEGMENT_H_
#define LIBDDP_COMM_MEMORY_SHARE_SEGMENT_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/memory/shared_segment.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

// Returns the notes of all ranks, by rank.
using ExchangeNotes = std::function<absl::StatusOr<std::vector<Note>>(const Note& mine)>;

// One rank's part in creating a segment. Rank numbers are those of the exchange.
struct SegmentShare {
  int rank = 0;
  int leader = -1;   // the rank that creates this rank's segment; -1: this rank gets none, but joins the exchanges
  size_t bytes = 0;  // of the segment
  absl::Status ready = absl::OkStatus();  // an error of this rank's becomes everybody's
  int place = -1;  // this rank's place among those that share it: marked, see SharedSegment::Mark; -1: not marked
  // The part of the segment that this rank reserves. The kernel places that memory near the rank.
  size_t own_offset = 0, own_bytes = 0;
};

// Collective over all ranks of the exchange; if one rank fails, all return the same error. Returns null on a rank
// without a leader. With DDP_SHARED_MEMORY=auto, all ranks try POSIX shared memory if one of them cannot open a memfd,
// for example because it runs in another container.
//
// Memory is reserved only when the segment no longer has a name, so a job killed in between leaves none in /dev/shm.
absl::StatusOr<std::shared_ptr<SharedSegment>> ShareSegment(const SegmentShare& share, const ExchangeNotes& exchange);

// For a segment that `ranks` share as a whole: the first of them creates and reserves it.
SegmentShare ControlShare(int rank, const std::vector<int>& ranks, size_t bytes);

// Exchanges by the operations of a group, or by a rendezvous where there is no group yet.
ExchangeNotes ExchangeOver(ProcessGroup& group);
ExchangeNotes ExchangeOver(Rendezvous& rendezvous, absl::Time deadline);

}  // namespace ddp

#endif  // LIBDDP_COMM_MEMORY_SHARE_SEGMENT_H_
