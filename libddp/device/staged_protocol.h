// SPDX-License-Identifier: Apache-2.0
// How GPUs that cannot reach each other move data through host memory that all of them reach: who writes what where,
// who waits for whom, and when a place may be used again. Functions of one thread block, compiled for the GPU's kernels
// and, by tests, for the CPU: a `Block` supplies what differs.
//
// Every rank has two rings of slots in the shared memory for each channel. A rank copies what others need of its input
// into its input ring; a rank that reduces reads these, and puts what others need of the result into its result ring.
// Counters say how far each rank is: the writer of a slot waits until all have read what was there before, the reader
// until it is written. They only grow, over all operations. A rank's own counts are kept in the GPU's memory, so that a
// kernel that is launched again by a graph goes on where the last one has ended.
//
// A large array is cut into tiles, and a tile into parts: one for each rank where each rank reduces a part (the
// two-phase all-reduce, after Rabenseifner, "Optimization of Collective Reduction Operations", 2004), or a single one
// where each rank reduces everything. Channel c works on the tiles c, c + channels, ...
//
// A small array goes as packets, in which data and a mark come together: nobody waits for a counter.
#ifndef LIBDDP_DEVICE_STAGED_PROTOCOL_H_
#define LIBDDP_DEVICE_STAGED_PROTOCOL_H_

#include <cstddef>
#include <cstdint>

#include "libddp/device/scale_rule.h"
#include "libddp/device/staged_memory.h"

namespace ddp::staged {

inline constexpr int kMaxRanges = 48;  // on either side of one launch

// One side of an operation: ranges of memory that stand end to end.
struct RangeTable {
  char* data[kMaxRanges];
  uint64_t end[kMaxRanges];  // in bytes, of the logical array
  int ranges;
};

enum class Move : uint8_t {
  kAllReduce,             // in two phases: each rank reduces a part of each tile
  kAllReduceOnce,         // in one: each rank reduces everything
  kAllReducePackets,      // in two, by packets; a channel has one tile
  kAllReducePacketsOnce,  // in one, by packets
  kAllReduceFetched,      // this rank's reduction of a chunk that copies have fetched; waits for nobody (staged_turn.h)
  kReduceScatter,
  kReduce,  // to `root`
  kAllGather,
  kBroadcast,  // from `root`; `in` there, `out` elsewhere
  kBarrier,
};

// What the arithmetic needs; the numbers are CpuReduce's. A scale is 1 where there is nothing to scale.
struct Arithmetic {
  double pre64 = 1, post64 = 1;
  float pre32 = 1, post32 = 1;
  int divisor = 1;
  uint8_t in_type = 7, out_type = 7;  // as cuda::Type; bytes
  uint8_t op = 0;                     // as ReduceOp
  uint32_t* nonfinite = nullptr;      // null: not asked for
};

// Elements of an all-reduce for which copies have fetched what the other ranks contribute: these contributions, in rank
// order, are `stride` bytes apart in the GPU's memory.
struct Chunk {
  uint64_t begin, count;
  const char* fetched;
  uint64_t stride;
  char* also;   // the result goes here, too; null: only where it belongs
  bool looked;  // a turn has looked at the ring's words since these were fetched
};

struct Collective {
  Place at;
  Move move;
  int root;
  int channels;                        // that this operation uses
  bool split;                          // a thread block for each of the three duties of a channel, else one for all
  uint64_t tiles;                      // of all channels together
  uint64_t part_elements;              // of one part in one tile, at most
  uint64_t count;                      // elements of the whole array
  uint64_t part_begin[kMaxRanks + 1];  // of the ranks' parts of the whole; by element. Not for all-reduces
  Chunk chunk;                         // of kAllReduceFetched, which channels share in tiles of part_elements
  int in_size, out_size;               // bytes of an element
  Arithmetic arithmetic;
  RangeTable in, out;
};

DDP_HOST_DEVICE inline bool ByPackets(Move move) {
  return move == Move::kAllReducePackets || move == Move::kAllReducePacketsOnce;
}
// Of a packet. As many results have room in it.
DDP_HOST_DEVICE inline uint64_t PacketElements(const Collective& c) {
  return static_cast<uint64_t>(kPacketBytes / (c.in_size > c.out_size ? c.in_size : c.out_size));
}
DDP_HOST_DEVICE inline bool UsesInputs(Move move) { return move != Move::kAllGather && move != Move::kBroadcast; }
DDP_HOST_DEVICE inline bool UsesResults(Move move) {
  return move == Move::kAllReduce || move == Move::kAllGather || move == Move::kBroadcast;
}
// Whether each rank has a part of its own.
DDP_HOST_DEVICE inline bool HasParts(Move move) {
  return move == Move::kAllReduce || move == Move::kReduceScatter || move == Move::kAllGather;
}

// `begin`: in the whole array; `own`: in the side that holds one rank's part, or a chunk, alone.
struct Part {
  uint64_t begin, own, count;
};

DDP_HOST_DEVICE inline Part PartOf(const Collective& c, uint64_t tile, int part) {
  const uint64_t step = tile * c.part_elements;
  uint64_t begin = 0, end = 0;
  if (c.move == Move::kReduceScatter || c.move == Move::kAllGather) {
    begin = c.part_begin[part] + step;
    end = c.part_begin[part + 1];
  } else if (c.move == Move::kAllReduceFetched) {
    begin = c.chunk.begin + step;
    end = c.chunk.begin + c.chunk.count;
  } else {
    begin = HasParts(c.move) ? step * static_cast<uint64_t>(c.at.ranks) + static_cast<uint64_t>(part) * c.part_elements
                             : step;
    end = c.count;
  }
  const uint64_t left = begin < end ? end - begin : 0;
  return {begin, step, left < c.part_elements ? left : c.part_elements};
}

// The address of byte `offset`; *bytes becomes how many follow it in its range, if these are fewer.
DDP_HOST_DEVICE inline char* Locate(const RangeTable& table, uint64_t offset, uint64_t* bytes) {
  int low = 0, high = table.ranges - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (offset < table.end[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const uint64_t begin = low == 0 ? 0 : table.end[low - 1];
  if (table.end[low] - offset < *bytes) *bytes = table.end[low] - offset;
  return table.data[low] + (offset - begin);
}

// Bytes that lie together where they come from and where they go.
struct Piece {
  char* to;
  const char* from;
  uint64_t bytes;
};

// A counter and a value of it; null: none.
struct Level {
  Counter* counter;
  uint64_t value;
};

// What a Block does (all its threads call everything). An operation that was left before its end leaves wrong counts,
// and none may come after it: who leaves sets all words of the ring and the rank's own. (Packets tell by their marks
// which operation they are of.)
//   bool Begin()                                   false if the group has failed
//   bool Wait(int n, Fn level)                     until the counters of level(0) to level(n - 1) are at least at their
//                                                  values; false if the operation has to be left. All at once:
//                                                  each look at host memory takes more than a microsecond
//   void Signal(Level, Level = {})                 what the block has written comes before the new values
//   void Tell(int n, Fn level)                     the same of several counters at once
//   void Fail()                                    the group has failed: sets the words of all ranks
//   void Copy(const Piece*, int n, bool from_ring) all at once, too; what comes from the ring is a result, which is
//                                                  checked for infinities and NaN
//   void Reduce(const char* const* from, int n, char* to, char* also, uint64_t elements)   `also` may be null
//   uint64_t Load(const uint64_t*), void Store(uint64_t*, uint64_t)   of the rank's own counts
//   bool All(bool going_on)                        whether all threads go on, and have come here
// And each of its threads, thread() of threads(), alone, with `n` elements from `first` on, which fit into a packet:
//   PacketData Gather(const RangeTable& in, uint64_t first, uint64_t n, uint64_t size)   of elements of `size` bytes
//   void Put(Packet*, const PacketData&, uint32_t mark)
//   void Scatter(const RangeTable& out, uint64_t first, uint64_t n, uint64_t size, const PacketData&)   the other way
//   bool Receive(const Packet*, uint64_t stride, uint32_t mark, int ranks, int me, const PacketData& own,
//                PacketData* data)                 fills in data[r] of so many ranks, whose packets are `stride` apart;
//                                                  data[me] becomes `own`; false: leave
//   PacketData ReducePacket(const PacketData* data, uint64_t n)
//   void CheckPacket(const PacketData&, uint64_t n)   a result that another rank has made

// What a rank does with a tile. In a split operation each is a thread block of its own.
enum class Duty : int {
  kWrite,   // what others need of its input goes into its input slot
  kReduce,  // its part is reduced, or in moves taken, and published where others want it
  kFetch,   // the parts of the result that others have published
  kAll,
};

DDP_HOST_DEVICE inline bool IsIdle(const Collective& c) {
  return c.move == Move::kBarrier || ((c.move == Move::kReduce || c.move == Move::kBroadcast) && c.at.rank != c.root);
}
DDP_HOST_DEVICE inline bool Fetches(const Collective& c, int from) {
  return from != c.at.rank && (c.move != Move::kBroadcast || from == c.root);
}

// Until the other ranks are as far as this duty needs. `counts`: slots that this thread block has been through, by
// Stage.
template <typename Block>
DDP_HOST_DEVICE bool Await(Block& block, const Collective& c, Duty duty, int channel, const uint64_t* counts) {
  const int ranks = c.at.ranks;
  const bool waits = UsesInputs(c.move) && !(c.move == Move::kReduce && IsIdle(c));
  const bool reuses = UsesResults(c.move) && !IsIdle(c) && counts[kPublished] >= kDepth;
  const auto level = [&](int k) {
    if (duty == Duty::kWrite) return Level{CounterOf(c.at, kConsumed, k, channel), counts[kWritten] - kDepth + 1};
    if (duty == Duty::kFetch) {
      return Level{Fetches(c, k) ? CounterOf(c.at, kPublished, k, channel) : nullptr, counts[kFetched] + 1};
    }
    if (k >= ranks) return Level{CounterOf(c.at, kFetched, k - ranks, channel), counts[kPublished] - kDepth + 1};
    return Level{waits ? CounterOf(c.at, kWritten, k, channel) : nullptr, counts[kConsumed] + 1};
  };
  if (duty == Duty::kWrite) return block.Wait(counts[kWritten] >= kDepth ? ranks : 0, level);
  return block.Wait(duty == Duty::kReduce && reuses ? 2 * ranks : ranks, level);
}

// Where the copies of a duty stand: in which part, and how many bytes of that are done.
struct Cursor {
  int part = 0;
  uint64_t done = 0;
};

// The next piece of a duty's copies; false: there is none.
DDP_HOST_DEVICE inline bool NextToWrite(const Collective& c, uint64_t tile, char* slot, Cursor* at, Piece* piece) {
  const uint64_t size = static_cast<uint64_t>(c.in_size);
  const bool nothing = c.move == Move::kBarrier || (c.move == Move::kReduce && c.at.rank == c.root);
  const int parts = nothing ? 0 : HasParts(c.move) ? c.at.ranks : 1;
  for (; at->part < parts; ++at->part, at->done = 0) {
    const Part part = PartOf(c, tile, at->part);
    if ((HasParts(c.move) && at->part == c.at.rank) || at->done == part.count * size) continue;
    piece->bytes = part.count * size - at->done;
    piece->from = Locate(c.in, part.begin * size + at->done, &piece->bytes);
    piece->to = slot + static_cast<uint64_t>(at->part) * c.part_elements * size + at->done;
    at->done += piece->bytes;
    return true;
  }
  return false;
}
// Into the slot, then, where that is another place, into the result.
DDP_HOST_DEVICE inline bool NextToPublish(const Collective& c, uint64_t tile, char* slot, Cursor* at, Piece* piece) {
  const uint64_t size = static_cast<uint64_t>(c.in_size);
  const Part part = PartOf(c, tile, HasParts(c.move) ? c.at.rank : 0);
  const uint64_t in_at = (c.move == Move::kAllGather ? part.own : part.begin) * size;
  const int ways = IsIdle(c) ? 0 : c.move == Move::kBroadcast ? 1 : 2;
  for (; at->part < ways; ++at->part, at->done = 0) {
    while (at->done < part.count * size) {
      piece->bytes = part.count * size - at->done;
      piece->from = Locate(c.in, in_at + at->done, &piece->bytes);
      piece->to = at->part == 0 ? slot + at->done : Locate(c.out, part.begin * size + at->done, &piece->bytes);
      at->done += piece->bytes;
      if (piece->to != piece->from) return true;
    }
  }
  return false;
}
// Each rank begins with its neighbour: not all read the same memory at once.
DDP_HOST_DEVICE inline bool NextToFetch(const Collective& c, int channel, uint64_t tile, uint64_t number, Cursor* at,
                                        Piece* piece) {
  const uint64_t size = static_cast<uint64_t>(c.out_size);
  for (; at->part < c.at.ranks; ++at->part, at->done = 0) {
    const int r = (c.at.rank + at->part) % c.at.ranks;
    const Part part = PartOf(c, tile, HasParts(c.move) ? r : 0);
    if (!Fetches(c, r) || at->done == part.count * size) continue;
    piece->bytes = part.count * size - at->done;
    piece->to = Locate(c.out, part.begin * size + at->done, &piece->bytes);
    piece->from = SlotOf(c.at, 1, r, channel, number) + at->done;
    at->done += piece->bytes;
    return true;
  }
  return false;
}

// All copies of a duty, as many pieces at a time as there are ranks at most. This is the only place that copies, for
// the compiler's sake: its code is long.
template <typename Block>
DDP_HOST_DEVICE void CopyTile(Block& block, const Collective& c, Duty duty, int channel, uint64_t tile,
                              const uint64_t* counts) {
  char* const slot = duty == Duty::kWrite ? SlotOf(c.at, 0, c.at.rank, channel, counts[kWritten])
                                          : SlotOf(c.at, 1, c.at.rank, channel, counts[kPublished]);
  Cursor at;
  const auto next = [&](Piece* piece) {
    if (duty == Duty::kWrite) return NextToWrite(c, tile, slot, &at, piece);
    if (duty == Duty::kReduce) return NextToPublish(c, tile, slot, &at, piece);
    return NextToFetch(c, channel, tile, counts[kFetched], &at, piece);
  };
  Piece pieces[kMaxRanks];
  for (bool more = true; more;) {
    int n = 0;
    while (n < kMaxRanks && (more = next(&pieces[n]))) ++n;
    if (n > 0) block.Copy(pieces, n, duty == Duty::kFetch);
  }
}

template <typename Block>
DDP_HOST_DEVICE void ReduceTile(Block& block, const Collective& c, int channel, uint64_t tile, const uint64_t* counts) {
  const int ranks = c.at.ranks, me = c.at.rank;
  const int mine = HasParts(c.move) ? me : 0;
  const Part part = PartOf(c, tile, mine);
  const uint64_t in_size = static_cast<uint64_t>(c.in_size), out_size = static_cast<uint64_t>(c.out_size);
  const uint64_t out_at = c.move == Move::kReduceScatter ? part.own : part.begin;
  const bool fetched = c.move == Move::kAllReduceFetched;
  char* const slot = UsesResults(c.move)                  ? SlotOf(c.at, 1, me, channel, counts[kPublished])
                     : fetched && c.chunk.also != nullptr ? c.chunk.also + part.own * out_size
                                                          : nullptr;
  const auto contribution = [&](int r) -> const char* {
    if (fetched) {
      return c.chunk.fetched + static_cast<uint64_t>(r < me ? r : r - 1) * c.chunk.stride + part.own * in_size;
    }
    return SlotOf(c.at, 0, r, channel, counts[kConsumed]) + static_cast<uint64_t>(mine) * c.part_elements * in_size;
  };
  for (uint64_t done = 0, n = 0; done < part.count; done += n) {
    uint64_t in_bytes = (part.count - done) * in_size, out_bytes = (part.count - done) * out_size;
    const char* const own = Locate(c.in, (part.begin + done) * in_size, &in_bytes);
    char* const to = Locate(c.out, (out_at + done) * out_size, &out_bytes);
    n = in_bytes / in_size < out_bytes / out_size ? in_bytes / in_size : out_bytes / out_size;
    const char* from[kMaxRanks];
    for (int r = 0; r < ranks; ++r) from[r] = r == me ? own : contribution(r) + done * in_size;
    block.Reduce(from, ranks, to, slot == nullptr ? nullptr : slot + done * out_size, n);
  }
}

// One duty's share of a tile; false if the operation has to be left.
template <typename Block>
DDP_HOST_DEVICE bool RunDuty(Block& block, const Collective& c, Duty duty, int channel, uint64_t tile,
                             uint64_t* counts) {
  if (!Await(block, c, duty, channel, counts)) return false;
  const bool inputs = UsesInputs(c.move), results = UsesResults(c.move);
  if (duty != Duty::kReduce || !inputs) {
    CopyTile(block, c, duty, channel, tile, counts);
  } else if (!IsIdle(c)) {
    ReduceTile(block, c, channel, tile, counts);
  }
  const auto level = [&](bool counted, Stage stage) {
    return Level{counted ? CounterOf(c.at, stage, c.at.rank, channel) : nullptr, ++counts[stage]};
  };
  if (duty == Duty::kReduce) {
    const Level published = level(results, kPublished);
    block.Signal(published, level(inputs, kConsumed));
  } else {
    block.Signal(level(true, duty == Duty::kWrite ? kWritten : kFetched));
  }
  return true;
}

// LeftOf, which another thread block of this kernel may set at any time: the threads of one go on together, or not.
template <typename Block>
DDP_HOST_DEVICE bool HasLeft(Block& block, const Place& at) {
  return !block.All(block.Load(LeftOf(at)) == 0);
}

// The protocol that NCCL calls LL, for low latency, with one mark for 12 bytes of data instead of 4. In two phases a
// channel's packets are shared out: each rank reduces its own, and passes the results on at their places in its own
// area, which are free, as it sends nobody those. It waits for results only after that, and for all else only before:
// so all go on. Who is at the end of operation n + 1 has something of it that everybody has contributed to, after the
// end of n: so two sets of packets are enough.
template <typename Block>
DDP_HOST_DEVICE void RunPackets(Block& block, const Collective& c, int channel) {
  // Marks come round after 2^32 operations. What was written that long ago must not be there any more.
  constexpr uint64_t kRenewal = 1 << 24;
  if (HasLeft(block, c.at)) return;
  uint64_t* const count = PacketCountOf(c.at, channel);
  const uint64_t operation = block.Load(count) + 1;
  const uint32_t mark = static_cast<uint32_t>(operation);
  const Part part = PartOf(c, static_cast<uint64_t>(channel), 0);
  const uint64_t in_size = static_cast<uint64_t>(c.in_size), out_size = static_cast<uint64_t>(c.out_size);
  const uint64_t each = PacketElements(c);
  const uint32_t packets = static_cast<uint32_t>((part.count + each - 1) / each);
  const auto elements = [&](uint64_t i) { return part.count - i * each < each ? part.count - i * each : each; };
  const uint32_t me = static_cast<uint32_t>(c.at.rank), ranks = static_cast<uint32_t>(c.at.ranks);
  const bool shared = c.move == Move::kAllReducePackets;
  const uint32_t share = shared ? (packets + ranks - 1) / ranks : packets;  // the last ranks may have less, or nothing
  const uint32_t own_at = !shared ? 0 : me * share < packets ? me * share : packets;
  const uint32_t owned = packets - own_at < share ? packets - own_at : share;
  const uint32_t thread = static_cast<uint32_t>(block.thread()), step = static_cast<uint32_t>(block.threads());
  Packet* const mine = PacketsOf(c.at, c.at.rank, channel, operation);
  for (uint32_t i = thread; i < (operation % kRenewal < 2 ? kPackets : packets); i += step) {
    if (shared && i - own_at < owned) continue;
    block.Put(&mine[i], i < packets ? block.Gather(c.in, part.begin + i * each, elements(i), in_size) : PacketData{},
              mark);
  }
  Packet* const first = PacketsOf(c.at, 0, channel, operation);
  const uint64_t stride = static_cast<uint64_t>(PacketsOf(c.at, 1, channel, operation) - first);
  bool going_on = true;
  for (int phase = 0; phase < (shared ? 2 : 1); ++phase) {
    // Threads of a warp may wait for each other: none waits for results before all have passed on their own.
    if (phase > 0 && !block.All(going_on)) break;
    const bool own = phase == 0;
    for (uint32_t k = own ? thread : owned + thread; k < (own ? owned : packets); k += step) {
      const uint32_t i = own_at + k < packets ? own_at + k : own_at + k - packets;
      const uint64_t begin = part.begin + i * each, n = elements(i);
      const PacketData given = own ? block.Gather(c.in, begin, n, in_size) : PacketData{};
      const Packet* const from = first + i + (own ? 0 : i / share * stride);
      PacketData data[kMaxRanks];
      going_on = block.Receive(from, stride, mark, own ? c.at.ranks : 1, own ? c.at.rank : -1, given, data);
      if (!going_on) break;
      const PacketData result = own ? block.ReducePacket(data, n) : data[0];
      if (shared && own) block.Put(&mine[i], result, mark);
      if (!own) block.CheckPacket(result, n);
      block.Scatter(c.out, begin, n, out_size, result);
    }
  }
  block.Store(count, operation);
}

DDP_HOST_DEVICE inline int BlocksOf(const Collective& c) { return c.split ? 3 * c.channels : c.channels; }

// All tiles of thread block `index`: of a Collective, or another operation that has such tiles.
template <typename Block, typename Operation>
DDP_HOST_DEVICE void RunTiles(Block& block, const Operation& c, int index, bool inputs, bool results) {
  if (HasLeft(block, c.at)) return;
  const int channel = c.split ? index / 3 : index;
  const Duty duty = c.split ? static_cast<Duty>(index % 3) : Duty::kAll;
  const bool writes = inputs && (duty == Duty::kWrite || duty == Duty::kAll);
  const bool reduces = duty == Duty::kReduce || duty == Duty::kAll;
  const bool fetches = results && (duty == Duty::kFetch || duty == Duty::kAll);
  const bool does[] = {writes, reduces, fetches};
  // What another duty's thread block counts is not looked at: it may be at its end already.
  const bool uses[kStages] = {writes, reduces && inputs, reduces && results, fetches};
  uint64_t counts[kStages] = {};
  for (int s = 0; s < kStages; ++s) {
    if (uses[s]) counts[s] = block.Load(CountOf(c.at, static_cast<Stage>(s), channel));
  }
  for (uint64_t tile = static_cast<uint64_t>(channel); tile < c.tiles; tile += static_cast<uint64_t>(c.channels)) {
    for (int d = 0; d < static_cast<int>(Duty::kAll); ++d) {
      if (does[d] && !RunDuty(block, c, static_cast<Duty>(d), channel, tile, counts)) return;
    }
  }
  for (int s = 0; s < kStages; ++s) {
    if (uses[s]) block.Store(CountOf(c.at, static_cast<Stage>(s), channel), counts[s]);
  }
}

// What thread block `index` of BlocksOf does, in kAllReduceFetched, which waits for nobody. A look at the ring's words
// takes each thread block a microsecond.
template <typename Block>
DDP_HOST_DEVICE void RunFetched(Block& block, const Collective& c, int index) {
  if (c.chunk.looked ? HasLeft(block, c.at) : !block.Begin()) return;
  for (uint64_t tile = static_cast<uint64_t>(index); tile < c.tiles; tile += static_cast<uint64_t>(c.channels)) {
    ReduceTile(block, c, index, tile, nullptr);
  }
}
// In all other moves.
template <typename Block>
DDP_HOST_DEVICE void RunThroughRing(Block& block, const Collective& c, int index) {
  if (ByPackets(c.move)) return RunPackets(block, c, index);
  RunTiles(block, c, index, UsesInputs(c.move), UsesResults(c.move));
}
template <typename Block>
DDP_HOST_DEVICE void RunCollective(Block& block, const Collective& c, int index) {
  c.move == Move::kAllReduceFetched ? RunFetched(block, c, index) : RunThroughRing(block, c, index);
}

}  // namespace ddp::staged

#endif  // LIBDDP_DEVICE_STAGED_PROTOCOL_H_
