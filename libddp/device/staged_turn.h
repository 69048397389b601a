// SPDX-License-Identifier: Apache-2.0
// How ranks take turns at host memory that the copy engines move: who may copy where, and when. The copies of a large
// all-reduce cannot wait for each other by themselves, so a small kernel before each waits, and one after it tells.
//
// A rank's array is cut into chunks, which alternate between lanes. A lane has kCopyDepth slots in host memory for each
// rank. Chunk after chunk, a rank copies its contribution down into its own slot, and everybody's up into its GPU's
// memory, where a kernel reduces it (Move::kAllReduceFetched). Each lane begins an operation at its first slot, so that
// a CUDA graph may hold the copies. Counters say how many chunks are down, and how many everybody has up. They only
// grow; what a rank's own counts were when the operation began is kept in its GPU's memory.
#ifndef LIBDDP_DEVICE_STAGED_TURN_H_
#define LIBDDP_DEVICE_STAGED_TURN_H_

#include "libddp/device/staged_protocol.h"

namespace ddp::staged {

inline constexpr int kCopyLanes = 2;
inline constexpr uint64_t kCopyDepth = 2;  // slots of a lane

enum Way : int { kDown, kUp, kWays };  // into host memory, out of it

// A wait, or a word, between two copies of one way and lane. Numbers are those of chunks in the lane, from 1 on.
struct Turn {
  Place at;
  Counter* counters;  // of all ranks, ways and lanes, in the shared memory
  uint64_t* counts;   // this rank's own: kTurnCounts, in the GPU's memory
  Way way;
  int lane;
  bool waits;        // else it tells
  uint64_t number;   // of the chunk that the others must have down, or up, or that this rank has
  uint64_t advance;  // 0, or how many chunks the lane has in the operation, of which this turn is its way's last
};

inline constexpr int kTurnCounts = kWays * kCopyLanes;
DDP_HOST_DEVICE inline size_t TurnCounterBytes(int ranks) {
  return static_cast<size_t>(ranks) * kTurnCounts * sizeof(Counter);
}
DDP_HOST_DEVICE inline Counter* TurnCounterOf(const Turn& t, Way way, int rank) {
  return t.counters + (rank * kWays + way) * kCopyLanes + t.lane;
}

// What a Block does: see staged_protocol.h. A copy behind a turn that was left comes all the same, and may write over
// what a peer still reads: so the peers are told first. Who reduces looks at the ring's word after the fetch.
template <typename Block>
DDP_HOST_DEVICE void RunTurn(Block& block, const Turn& t) {
  uint64_t* const count = t.counts + t.way * kCopyLanes + t.lane;
  const uint64_t target = block.Load(count) + t.number;
  const Way other = t.way == kDown ? kUp : kDown;
  const auto theirs = [&](int r) { return Level{r == t.at.rank ? nullptr : TurnCounterOf(t, other, r), target}; };
  if (!block.Begin() || (t.waits && !block.Wait(t.at.ranks, theirs))) return block.Fail();
  if (!t.waits) block.Signal({TurnCounterOf(t, t.way, t.at.rank), target});
  if (t.advance > 0) block.Store(count, target - t.number + t.advance);
}

}  // namespace ddp::staged

#endif  // LIBDDP_DEVICE_STAGED_TURN_H_
