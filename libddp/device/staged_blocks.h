// SPDX-License-Identifier: Apache-2.0
// The all-reduce of the staged protocol in block-scaled 8 bits (block_rule.h): what goes through host memory is a
// quarter of a float32 array. It has two phases, as Move::kAllReduce, and the same slots and counters. Each rank
// quantizes its contribution as it writes it, its own part included; the sum of a part is quantized again. So a
// result's bits are those of quantizing, exchanging and reducing one after the other.
#ifndef LIBDDP_DEVICE_STAGED_BLOCKS_H_
#define LIBDDP_DEVICE_STAGED_BLOCKS_H_

#include <cstdint>

#include "libddp/device/block_rule.h"
#include "libddp/device/staged_protocol.h"

namespace ddp::staged {

struct BlockReduction {
  Place at;
  blocks::Format format;
  uint8_t dtype;  // as DType: float32, float16 or bfloat16
  int size;       // bytes of an element
  float prescale, postscale;
  const char* in;
  char* out;       // may be `in`
  uint64_t count;  // elements
  int channels;    // these as in Collective
  bool split;
  uint64_t tiles;
  uint64_t part_groups;  // of one rank's part in one tile, at most
};

DDP_HOST_DEVICE inline int BlocksOf(const BlockReduction& c) { return c.split ? 3 * c.channels : c.channels; }

struct BlockPart {
  uint64_t begin, count;  // elements
};
DDP_HOST_DEVICE inline BlockPart PartOf(const BlockReduction& c, uint64_t tile, int part) {
  const uint64_t most = c.part_groups * blocks::kGroup;
  const uint64_t begin = (tile * static_cast<uint64_t>(c.at.ranks) + static_cast<uint64_t>(part)) * most;
  const uint64_t left = begin < c.count ? c.count - begin : 0;
  return {begin, left < most ? left : most};
}

// Beyond what staged_protocol.h says, a Block does:
//   void Quantize(const char* from, uint64_t count, char* groups)   scaled by prescale
//   void Reduce(const char* own, uint64_t count, const char* groups, uint64_t stride, char* publish, char* to)
//       groups: rank 0's contribution; the others' follow at this stride, but for its own, which is still to be
//       quantized
//   void Dequantize(const char* groups, uint64_t count, char* to)   from the ring

template <typename Block>
DDP_HOST_DEVICE bool WriteTile(Block& block, const BlockReduction& c, int channel, uint64_t tile, uint64_t number) {
  const auto consumed = [&](int r) { return Level{CounterOf(c.at, kConsumed, r, channel), number - kDepth + 1}; };
  if (!block.Wait(number >= kDepth ? c.at.ranks : 0, consumed)) return false;
  char* const slot = SlotOf(c.at, 0, c.at.rank, channel, number);
  for (int p = 0; p < c.at.ranks; ++p) {
    const BlockPart part = PartOf(c, tile, p);
    if (p == c.at.rank || part.count == 0) continue;
    block.Quantize(c.in + part.begin * static_cast<uint64_t>(c.size), part.count,
                   slot + static_cast<uint64_t>(p) * c.part_groups * blocks::kGroupBytes);
  }
  block.Signal({CounterOf(c.at, kWritten, c.at.rank, channel), number + 1});
  return true;
}

template <typename Block>
DDP_HOST_DEVICE bool ReduceTile(Block& block, const BlockReduction& c, int channel, uint64_t tile, uint64_t input,
                                uint64_t result) {
  const int me = c.at.rank;
  const auto level = [&](int k) {
    return k < c.at.ranks ? Level{CounterOf(c.at, kWritten, k, channel), input + 1}
                          : Level{CounterOf(c.at, kFetched, k - c.at.ranks, channel), result - kDepth + 1};
  };
  if (!block.Wait(result >= kDepth ? 2 * c.at.ranks : c.at.ranks, level)) return false;
  const BlockPart part = PartOf(c, tile, me);
  if (part.count > 0) {
    const uint64_t at = part.begin * static_cast<uint64_t>(c.size);
    const char* const first = SlotOf(c.at, 0, 0, channel, input);
    const uint64_t stride = static_cast<uint64_t>(SlotOf(c.at, 0, 1, channel, input) - first);
    block.Reduce(c.in + at, part.count, first + static_cast<uint64_t>(me) * c.part_groups * blocks::kGroupBytes, stride,
                 SlotOf(c.at, 1, me, channel, result), c.out + at);
  }
  block.Signal({CounterOf(c.at, kPublished, me, channel), result + 1},
               {CounterOf(c.at, kConsumed, me, channel), input + 1});
  return true;
}

template <typename Block>
DDP_HOST_DEVICE bool FetchTile(Block& block, const BlockReduction& c, int channel, uint64_t tile, uint64_t number) {
  const int me = c.at.rank;
  const auto published = [&](int r) {
    return Level{r == me ? nullptr : CounterOf(c.at, kPublished, r, channel), number + 1};
  };
  if (!block.Wait(c.at.ranks, published)) return false;
  for (int k = 1; k < c.at.ranks; ++k) {
    const int r = (me + k) % c.at.ranks;
    const BlockPart part = PartOf(c, tile, r);
    if (part.count == 0) continue;
    block.Dequantize(SlotOf(c.at, 1, r, channel, number), part.count,
                     c.out + part.begin * static_cast<uint64_t>(c.size));
  }
  block.Signal({CounterOf(c.at, kFetched, me, channel), number + 1});
  return true;
}

template <typename Block>
DDP_HOST_DEVICE bool RunDuty(Block& block, const BlockReduction& c, Duty duty, int channel, uint64_t tile,
                             uint64_t* counts) {
  if (duty == Duty::kWrite) return WriteTile(block, c, channel, tile, counts[kWritten]++);
  if (duty == Duty::kFetch) return FetchTile(block, c, channel, tile, counts[kFetched]++);
  return ReduceTile(block, c, channel, tile, counts[kConsumed]++, counts[kPublished]++);
}

// What thread block `index` of BlocksOf does.
template <typename Block>
DDP_HOST_DEVICE void RunBlockReduction(Block& block, const BlockReduction& c, int index) {
  RunTiles(block, c, index, /*inputs=*/true, /*results=*/true);
}

}  // namespace ddp::staged

#endif  // LIBDDP_DEVICE_STAGED_BLOCKS_H_
