#include "libddp/comm/staged/staged_plan.h"

#include <algorithm>

#include "libddp/base/round.h"

namespace ddp {
namespace {

using staged::Move;

// Parts begin at multiples of 16 bytes in a slot, whatever the type.
constexpr uint64_t kAlign = 16;
// A thread block copies less than this no faster.
constexpr uint64_t kLeastBytes = 4 << 10;
// Of everybody's packets that a rank reads; what is larger is done sooner in slots.
constexpr uint64_t kMostInPackets = 128 << 10;
// A thread for each packet: with more thread blocks nothing is done sooner.
constexpr uint64_t kPacketsABlock = 256;

int MostChannels(int blocks) { return std::clamp(blocks, 1, staged::kMaxChannels); }

void PlanPackets(int blocks, staged::Collective* c) {
  const uint64_t each = static_cast<uint64_t>(staged::kPacketBytes / c->in_size);
  const uint64_t packets = std::max<uint64_t>(1, CeilDiv(c->count, each));
  const uint64_t channels = std::min(CeilDiv(packets, kPacketsABlock), static_cast<uint64_t>(MostChannels(blocks)));
  c->part_elements = CeilDiv(packets, channels) * each;
  c->tiles = CeilDiv(packets * each, c->part_elements);
  c->channels = static_cast<int>(c->tiles);
  c->split = false;
}

}  // namespace

Move AllReduceMove(int ranks, int blocks, uint64_t bytes) {
  const uint64_t fit = static_cast<uint64_t>(MostChannels(blocks)) * staged::kPackets * staged::kPacketBytes;
  if (bytes <= fit && bytes * static_cast<uint64_t>(ranks - 1) <= kMostInPackets) return Move::kAllReducePackets;
  return ranks == 2 ? Move::kAllReduceOnce : Move::kAllReduce;
}

void PlanTiles(int blocks, staged::Collective* c) {
  if (c->move == Move::kAllReducePackets) return PlanPackets(blocks, c);
  const uint64_t in_size = static_cast<uint64_t>(c->in_size), out_size = static_cast<uint64_t>(c->out_size);
  const uint64_t ranks = static_cast<uint64_t>(c->at.ranks);
  const uint64_t parts = HasParts(c->move) ? ranks : 1;
  uint64_t longest = c->count;  // of the parts that a rank reduces or publishes
  if (c->move == Move::kAllReduce) longest = CeilDiv(c->count, ranks);
  if (c->move == Move::kReduceScatter || c->move == Move::kAllGather) {
    longest = 0;
    for (uint64_t r = 0; r < ranks; ++r) longest = std::max(longest, c->part_begin[r + 1] - c->part_begin[r]);
  }
  uint64_t most = staged::kSlotBytes / out_size;
  if (UsesInputs(c->move)) most = std::min(most, staged::kSlotBytes / (parts * in_size));
  most = most / kAlign * kAlign;
  const uint64_t channels = static_cast<uint64_t>(std::clamp(blocks / 3, 1, staged::kMaxChannels));
  const uint64_t even = RoundUp(CeilDiv(longest, channels), kAlign);
  const uint64_t least = RoundUp(kLeastBytes / std::max(in_size, out_size), kAlign);
  c->part_elements = std::clamp(even, std::min(least, most), most);
  c->tiles = std::max<uint64_t>(1, CeilDiv(longest, c->part_elements));
  c->channels = static_cast<int>(std::min(channels, c->tiles));
  c->split = c->tiles > channels;
}

}  // namespace ddp
