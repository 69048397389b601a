// SPDX-License-Identifier: Apache-2.0
// What the ranks of a hierarchical group on one host have in common: a segment of shared memory, laid out here.
//
//   SharedFailure      why the group has failed, once it has
//   ReportElection     who reports a stall or a failure
//   PeerLine[n]        one per rank: how far it is
//   Slot[slots()][n]   a ring of operations: number q uses row q % slots(). Each rank announces its part in its own
//                      column; nobody else writes there but to claim work.
//   inline[slots()][n] kInlineBytes each: the data of a small operation, or the list of its ranges
//   large[larges()][n] kLargeBytes each: data that travel likewise but are larger, operation q in row q % larges()
//   FlightRing[n]      one per rank: what it has been doing last
//   stage[n][2]        kStageBytes each: where ranks pass on data that does not lie in shared memory
//
// Words written by different ranks lie in different cache lines: a line that bounces between cores costs 50 to 200 ns
// each way.
#ifndef LIBDDP_COMM_HOST_CONTROL_BLOCK_H_
#define LIBDDP_COMM_HOST_CONTROL_BLOCK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "libddp/base/page.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/health/flight_ring.h"
#include "libddp/comm/health/report_election.h"
#include "libddp/comm/health/shared_failure.h"
#include "libddp/comm/memory/allocation_table.h"

namespace ddp {

inline constexpr size_t kBlockAlign = 4096;  // of what is large, and of the whole
inline constexpr size_t kInlineBytes = 8192;
// Not a power of two, so that the slots do not compete for the same few sets of the first-level cache.
inline constexpr size_t kInlineStride = kInlineBytes + 17 * kCacheLine;
inline constexpr size_t kLargeBytes = size_t{64} << 10;
inline constexpr size_t kLargeStride = kLargeBytes + 17 * kCacheLine;
inline constexpr size_t kStageBytes = size_t{512} << 10;

struct alignas(kCacheLine) PeerLine {
  std::atomic<uint64_t> retired;   // operations 0 .. retired - 1 are finished here: their slots may be used again
  std::atomic<uint64_t> copied;    // staging rounds (counted over the group's life) whose input this rank has laid out
  std::atomic<uint64_t> reduced;   // ... and whose share it has reduced, of all-reduces
  std::atomic<uint32_t> departed;  // the rank has left in good order
  std::atomic<uint32_t> working;   // threads of the rank that may be writing to others' memory, see Engine::Step
  std::atomic<int64_t> seen_ns;    // when the rank last waited for its peers, on the clock of NowNs
  // Where in its own memory the rank keeps `token`, for others to find out whether they can read that; 0: not yet said.
  std::atomic<uint64_t> token_address;
  uint64_t token;
};

// Where a rank's data lies, as it tells its peers; see ChoosePlacement.
enum class Placement : uint32_t {
  kPrivate,      // out of their reach
  kReadable,     // one range each for in and out, in a process whose memory they can read
  kInline,       // out of their reach, but what they need of it travels with the announcement
  kSharedRange,  // one range each for in and out, in memory that all ranks reach
  kSharedList,   // several ranges there, listed with the announcement: `in` entries, then `out` entries
};

// One rank's part of one operation. Everything but `sequence` is written before it.
struct alignas(kCacheLine) Announcement {
  std::atomic<uint64_t> sequence;  // the operation's number + 1
  CallSummary call;
  uint64_t in, out;  // Address of the one range, or the rank's own address of it, or the number of ranges
  Placement placement;
};

inline constexpr size_t kMaxListedRanges = kInlineBytes / sizeof(ListedRange);

struct Slot {
  Announcement announcement;
  // The chunks of this rank's slice: how many have been claimed, and how many are done. By whoever has time, first of
  // all by this rank.
  alignas(kCacheLine) std::atomic<uint32_t> claimed;
  alignas(kCacheLine) std::atomic<uint32_t> done;
  std::atomic<uint32_t> nonfinite;
  std::atomic<int64_t> done_ns;  // of a bucket's: when the last chunk was done, on the clock of NowNs
};

// Computes where everything lies for a group of `ranks`.
class ControlBlock {
 public:
  ControlBlock() = default;
  ControlBlock(char* base, int ranks) : base_(base), ranks_(static_cast<size_t>(ranks)) {}

  // Powers of two. So many rows that a line has left the caches next to its readers' cores before it is written again:
  // to take it back from there can cost three times as much. With many ranks less, for the memory's sake.
  uint64_t slots() const { return ranks_ <= 8 ? 128 : 32; }
  uint64_t larges() const { return ranks_ <= 8 ? 16 : 4; }

  // A multiple of kBlockAlign.
  static size_t Bytes(int ranks) { return ControlBlock(nullptr, ranks).StageOffset(static_cast<size_t>(ranks), 0); }

  SharedFailure& failure() const { return *reinterpret_cast<SharedFailure*>(base_); }
  ReportElection& election() const { return *reinterpret_cast<ReportElection*>(base_ + sizeof(SharedFailure)); }
  PeerLine& peer(int rank) const { return reinterpret_cast<PeerLine*>(base_ + PeerOffset())[rank]; }
  Slot& slot(uint64_t sequence, int rank) const {
    return reinterpret_cast<Slot*>(base_ + SlotOffset())[Place(sequence, slots(), rank)];
  }
  char* inlined(uint64_t sequence, int rank, size_t bytes) const {
    if (bytes > kInlineBytes) return base_ + LargeOffset() + Place(sequence, larges(), rank) * kLargeStride;
    return base_ + InlineOffset() + Place(sequence, slots(), rank) * kInlineStride;
  }
  ListedRange* listed(uint64_t sequence, int rank) const {
    return reinterpret_cast<ListedRange*>(inlined(sequence, rank, 0));
  }
  FlightRing& flight(int rank) const { return reinterpret_cast<FlightRing*>(base_ + FlightOffset())[rank]; }
  // Whether all ranks are so far with the round that two counters of PeerLine count.
  bool AllReached(std::atomic<uint64_t> PeerLine::*counter, uint64_t value) const {
    for (int r = 0; r < static_cast<int>(ranks_); ++r) {
      if ((peer(r).*counter).load(std::memory_order_acquire) < value) return false;
    }
    return true;
  }
  char* stage(int rank, uint64_t round) const { return base_ + StageOffset(static_cast<size_t>(rank), round % 2); }

 private:
  size_t Place(uint64_t sequence, uint64_t rows, int rank) const {
    return (sequence & (rows - 1)) * ranks_ + static_cast<size_t>(rank);
  }
  static constexpr size_t PeerOffset() { return sizeof(SharedFailure) + sizeof(ReportElection); }
  size_t SlotOffset() const { return PeerOffset() + ranks_ * sizeof(PeerLine); }
  size_t InlineOffset() const { return RoundUp(SlotOffset() + slots() * ranks_ * sizeof(Slot), kBlockAlign); }
  size_t LargeOffset() const { return InlineOffset() + slots() * ranks_ * kInlineStride; }
  size_t FlightOffset() const { return LargeOffset() + larges() * ranks_ * kLargeStride; }
  // A gap between the stages keeps them from being a large power of two apart.
  size_t StageOffset(size_t rank, uint64_t parity) const {
    const size_t begin = RoundUp(FlightOffset() + ranks_ * sizeof(FlightRing), kBlockAlign);
    return begin + (rank * 2 + parity) * (kStageBytes + kBlockAlign);
  }

  char* base_ = nullptr;
  size_t ranks_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HOST_CONTROL_BLOCK_H_
