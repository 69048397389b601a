// SPDX-License-Identifier: Apache-2.0
// How ranks whose GPUs reach each other's memory wait for each other on their streams: a small kernel tells all peers,
// in their memory, that this rank has come so far, and waits until all of them have told it the same in its own.
#ifndef LIBDDP_DEVICE_STAGED_MEETING_H_
#define LIBDDP_DEVICE_STAGED_MEETING_H_

#include "libddp/device/staged_protocol.h"

namespace ddp::staged {

struct Meeting {
  Place at;
  Counter* told[kMaxRanks];  // each rank's, where this GPU sees them: one for each peer that tells it
  uint64_t* met;             // this rank's meetings so far, in its GPU's memory
};

// What a Block does: see staged_protocol.h. What is behind a meeting that was left comes all the same; so the peers
// are told first that the group has failed.
template <typename Block>
DDP_HOST_DEVICE void RunMeeting(Block& block, const Meeting& m) {
  const uint64_t number = block.Load(m.met) + 1;
  const int me = m.at.rank;
  if (!block.Begin()) return block.Fail();
  block.Tell(m.at.ranks, [&](int r) { return Level{r == me ? nullptr : m.told[r] + me, number}; });
  if (!block.Wait(m.at.ranks, [&](int r) { return Level{r == me ? nullptr : m.told[me] + r, number}; })) {
    return block.Fail();
  }
  block.Store(m.met, number);
}

}  // namespace ddp::staged

#endif  // LIBDDP_DEVICE_STAGED_MEETING_H_
