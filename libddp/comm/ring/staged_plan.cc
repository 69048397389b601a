// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/ring/staged_plan.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libddp/base/round.h"
#include "libddp/base/size_text.h"

namespace ddp {
namespace {

using staged::Move;

// Parts begin at multiples of 16 bytes in a slot, whatever the type.
constexpr uint64_t kElementAlign = 16;
// A thread block copies less than this no faster.
constexpr uint64_t kLeastBytes = 4 << 10;
// In the packets that a rank reads; what is larger is done sooner in slots.
constexpr uint64_t kMostInPackets = 256 << 10;
// The same in one phase, where there are two.
constexpr uint64_t kMostInPacketsOnce = 64 << 10;
// A thread for each packet: with more thread blocks nothing is done sooner.
constexpr uint64_t kPacketsABlock = 256;

uint64_t MostPacketChannels(int blocks) {
  return static_cast<uint64_t>(std::clamp(blocks, 1, staged::kPacketChannels));
}

void PlanPackets(int blocks, staged::Collective* c) {
  const uint64_t each = PacketElements(*c);
  const uint64_t packets = std::max<uint64_t>(1, CeilDiv(c->count, each));
  const uint64_t channels = std::min(CeilDiv(packets, kPacketsABlock), MostPacketChannels(blocks));
  c->part_elements = CeilDiv(packets, channels) * each;
  c->tiles = CeilDiv(packets * each, c->part_elements);
  c->channels = static_cast<int>(c->tiles);
  c->split = false;
}

}  // namespace

StagedLimits StagedLimits::For(int ranks) {
  StagedLimits limits;
  const uint64_t others = static_cast<uint64_t>(std::max(ranks - 1, 1));
  limits.packets = kMostInPackets * (others + 1) / (2 * others);  // in two phases; of two ranks, as much as in one
  limits.packets_once = ranks == 2 ? kNever : kMostInPacketsOnce / others;
  limits.once = ranks == 2 ? kNever : 0;
  limits.copies = ranks == 2 ? 8 << 20 : kNever;
  limits.least_chunk = 1 << 20;
  limits.chunk = 4 << 20;
  return limits;
}

absl::Status StagedLimits::Parse(absl::string_view text) {
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("DDP_STAGED_LIMITS is '", text, "', where ", what,
                     "; it must be measure, fixed, or like packets=64K,once=0,copies=8M,chunk=4M or copies=never"));
  };
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    if (part == "fixed" || part == "measure") continue;
    const std::vector<absl::string_view> sides = absl::StrSplit(part, absl::MaxSplits('=', 1));
    uint64_t* const limit = sides[0] == "packets"        ? &packets
                            : sides[0] == "packets_once" ? &packets_once
                            : sides[0] == "once"         ? &once
                            : sides[0] == "copies"       ? &copies
                            : sides[0] == "chunk"        ? &chunk
                            : sides[0] == "tile"         ? &tile
                            : sides[0] == "blocks"       ? &blocks
                                                         : nullptr;
    if (limit == nullptr || sides.size() != 2) return wrong(absl::StrCat("'", part, "' names no limit"));
    if (limit != &chunk && limit != &tile && sides[1] == "never") {
      *limit = limit == &copies ? kNever : 0;
      continue;
    }
    const std::optional<uint64_t> size = ParseSize(sides[1]);
    if (!size.has_value()) return wrong(absl::StrCat("'", sides[1], "' is no size"));
    *limit = *size;
    if (tile < 4096 || tile > staged::kSlotBytes) return wrong("the tile is not between 4K and 64K");
    if (limit != &chunk) continue;
    if (chunk < 4096 || chunk % 4096 != 0 || chunk > 1 << 30)
      return wrong("the chunk is no multiple of 4K up to 1024M");
    least_chunk = chunk;
  }
  return absl::OkStatus();
}

uint64_t MostInPackets(int blocks, uint64_t element) {
  return MostPacketChannels(blocks) * staged::kPackets * (staged::kPacketBytes / element * element);
}

Move AllReduceMove(const StagedLimits& limits, int ranks, int blocks, uint64_t count, uint64_t in_size,
                   uint64_t out_size) {
  const uint64_t bytes = count * in_size;
  if (bytes >= limits.copies && ranks > 1) return Move::kAllReduceFetched;
  const uint64_t element = std::max(in_size, out_size), larger = count * element;  // packets have room for both
  if (larger <= std::min(limits.packets, MostInPackets(blocks, element))) {
    return larger <= limits.packets_once ? Move::kAllReducePacketsOnce : Move::kAllReducePackets;
  }
  return bytes <= limits.once ? Move::kAllReduceOnce : Move::kAllReduce;
}

uint64_t ChunkOf(const StagedLimits& limits, uint64_t bytes) {
  constexpr double kBytesInTheCostOfOne = 256 << 10;
  uint64_t chunk = limits.least_chunk;
  const auto square = [](uint64_t n) { return static_cast<double>(n) * static_cast<double>(n); };
  while (chunk < limits.chunk && square(chunk) < static_cast<double>(bytes) * kBytesInTheCostOfOne) chunk *= 2;
  return std::min(chunk, limits.chunk);
}

void PlanTiles(int blocks, staged::Collective* c, uint64_t slot) {
  if (ByPackets(c->move)) return PlanPackets(blocks, c);
  if (c->move == Move::kAllReduceFetched) return;  // in chunks
  const uint64_t in_size = static_cast<uint64_t>(c->in_size), out_size = static_cast<uint64_t>(c->out_size);
  const uint64_t ranks = static_cast<uint64_t>(c->at.ranks);
  const uint64_t parts = HasParts(c->move) ? ranks : 1;
  uint64_t longest = c->count;  // of the parts that a rank reduces or publishes
  if (c->move == Move::kAllReduce) longest = CeilDiv(c->count, ranks);
  if (c->move == Move::kReduceScatter || c->move == Move::kAllGather) {
    longest = 0;
    for (uint64_t r = 0; r < ranks; ++r) longest = std::max(longest, c->part_begin[r + 1] - c->part_begin[r]);
  }
  uint64_t most = slot / out_size;
  if (UsesInputs(c->move)) most = std::min(most, slot / (parts * in_size));
  most = most / kElementAlign * kElementAlign;
  const uint64_t channels = static_cast<uint64_t>(std::clamp(blocks / 3, 1, staged::kMaxChannels));
  const uint64_t even = RoundUp(CeilDiv(longest, channels), kElementAlign);
  const uint64_t least = RoundUp(kLeastBytes / std::max(in_size, out_size), kElementAlign);
  c->part_elements = std::clamp(even, std::min(least, most), most);
  c->tiles = std::max<uint64_t>(1, CeilDiv(longest, c->part_elements));
  c->channels = static_cast<int>(std::min(channels, c->tiles));
  c->split = c->tiles > channels;
}

void PlanFetched(staged::Collective* c) {
  constexpr uint64_t kTileBytes = 32 << 10;
  c->split = false;
  c->part_elements = kTileBytes / static_cast<uint64_t>(c->in_size);
  c->tiles = CeilDiv(c->chunk.count, c->part_elements);
  c->channels = static_cast<int>(c->tiles);
}

void PlanBlocks(int thread_blocks, staged::BlockReduction* c) {
  const uint64_t ranks = static_cast<uint64_t>(c->at.ranks);
  const uint64_t longest = CeilDiv(blocks::GroupsOf(c->count), ranks);  // groups of the parts that a rank reduces
  const uint64_t channels = static_cast<uint64_t>(std::clamp(thread_blocks / 3, 1, staged::kMaxChannels));
  const uint64_t most = staged::kSlotBytes / (ranks * blocks::kGroupBytes);
  const uint64_t least = std::min(CeilDiv(kLeastBytes, blocks::kGroupBytes), most);
  c->part_groups = std::clamp(CeilDiv(longest, channels), least, most);
  c->tiles = std::max<uint64_t>(1, CeilDiv(longest, c->part_groups));
  c->channels = static_cast<int>(std::min(channels, c->tiles));
  c->split = c->tiles > channels;
}

}  // namespace ddp
