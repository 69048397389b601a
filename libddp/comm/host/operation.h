// One operation of a hierarchical group: what it is, where its data lies, and the pieces of work that it consists of.
#ifndef LIBDDP_COMM_HOST_OPERATION_H_
#define LIBDDP_COMM_HOST_OPERATION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "ddp/types.h"
#include "libddp/comm/base/counted_work.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/health/peer_watch.h"
#include "libddp/comm/host/control_block.h"
#include "libddp/comm/host/placement.h"
#include "libddp/comm/memory/shared_writer.h"
#include "libddp/device/cpu_reduce.h"

namespace ddp {

class Engine;

// Life: queued -> announced to the peers -> ready (all ranks have announced it, and agree) -> finished -> retired. The
// engine's mutex guards everything but the atomics; while `workers` is above 0 threads are inside RunChunks or
// RunTurn without it.
class Operation final : public CountedWork {
 public:
  Operation(Engine* engine, const OperationKey& key) : engine_(engine), key_(key) {}

  absl::Status Wait(absl::Time deadline) override;

  // --- set before the launch ---
  RangeList in, out;  // this rank's data
  // Elements of `in` (all-gather: of one rank's input; reduce-scatter and all-to-all: of all parts; all-gather with
  // counts: of all ranks' inputs together).
  size_t count = 0;
  std::vector<size_t> begins;  // all-gather with counts: where each rank's part begins in the result, and the end
  CpuReduce reduce;
  uint64_t parameters = 0;  // a hash of what else all ranks must agree on: scales, counts
  uint32_t* nonfinite = nullptr;
  int bucket = -1;
  // Where this is only a step of what the user called: that call, for the peers to compare and for messages.
  void CalledAs(const OperationKey& called, size_t called_count) {
    called_ = called;
    called_count_ = called_count;
  }

  // --- the engine's ---
  uint64_t sequence = 0;
  bool ready = false;
  Route route = Route::kInline;
  int arrived = 0;  // the ranks below this have announced it
  int workers = 0;
  int64_t noticed_ns = 0;  // when it was first seen to be the oldest unfinished one: its time-out counts from here
  // kDirect and kFetched: everybody's data. Where each rank's is one range, as nearly always, the addresses alone.
  absl::InlinedVector<char*, 4> in_bases, out_bases;
  std::vector<RangeList> ins, outs;
  absl::InlinedVector<uint32_t, 4> chunks;  // of each slice
  // kStaged, and kFetched, which is one round: the next thing to do.
  uint64_t first_round = 0, round = 0;
  enum class Phase { kCopyIn, kReduce, kCopyOut, kLeave } phase = Phase::kCopyIn;

  const OperationKey& key() const { return key_; }
  std::string Describe() const;  // "operation 7, all_reduce(avg, float32, 100 elements), bucket 3"
  const OperationKey& called() const { return called_.has_value() ? *called_ : key_; }
  size_t called_count() const { return called_.has_value() ? called_count_ : count; }
  size_t in_size() const { return SizeOf(key_.in); }  // of one element
  size_t out_size() const { return SizeOf(key_.out); }
  size_t in_bytes() const { return count * in_size(); }
  size_t in_bytes(int rank) const;  // of that rank's `in`
  bool IsBroadcast() const { return key_.kind == OperationKey::Kind::kBroadcast; }
  bool Reduces() const { return HasTwoSteps() || key_.kind == OperationKey::Kind::kReduceScatter; }
  // Whether `in` has a part for each rank.
  bool Scatters() const {
    return key_.kind == OperationKey::Kind::kReduceScatter || key_.kind == OperationKey::Kind::kAllToAll;
  }

  // kInline. What of this rank's data others need.
  size_t InlineBytes(int rank) const { return IsBroadcast() && rank != key_.root ? 0 : in.bytes(); }
  // kInline. Lays this rank's data out for the peers, and takes the result from what they have laid out and, since that
  // copy may have left its caches, from this rank's own data.
  void PutInline(const ControlBlock& control, SharedWriter* writer, int rank, int ranks) const;
  void TakeInline(const ControlBlock& control, int rank, int ranks);

  // kDirect. Claims and does chunks of this rank's slice and, if `steal`, then of the others', at most `limit` chunks;
  // returns how many.
  int RunChunks(const ControlBlock& control, int rank, int ranks, bool steal, int limit);
  void CutSlices(int ranks);
  bool ChunksDone(const ControlBlock& control) const;
  int64_t ChunksEndedNs(const ControlBlock& control) const;  // of a bucket's, once they are done; on any rank

  // kStaged and kFetched take their turns, one at a time: they share the stages.
  bool TakesTurns() const { return route == Route::kStaged || route == Route::kFetched; }
  uint64_t Rounds(int ranks) const;
  bool RoundsDone(int ranks) const { return round == Rounds(ranks); }
  // Does what can be done without waiting, or a piece of it; returns whether anything was, or why a peer's memory
  // cannot be read.
  absl::StatusOr<bool> RunTurn(const ControlBlock& control, const PeerWatch& peers, SharedWriter* writer, int rank,
                               int ranks) {
    if (route == Route::kFetched) return RunFetches(control, peers, rank, ranks);
    return RunRounds(control, writer, rank, ranks);
  }
  // By which a peer tells how many rounds it has done its part of.
  std::atomic<uint64_t> PeerLine::*DoneCounter() const {
    return route == Route::kStaged && HasTwoSteps() ? &PeerLine::reduced : &PeerLine::copied;
  }

 private:
  ~Operation() override = default;

  // Whether ranks need what others have made of their inputs, not only those.
  bool HasTwoSteps() const { return key_.kind == OperationKey::Kind::kAllReduce; }

  // Elements: a rank's part of the result of an all-gather.
  size_t PartBegin(int rank) const {
    return begins.empty() ? count * static_cast<size_t>(rank) : begins[static_cast<size_t>(rank)];
  }
  size_t PartCount(int rank) const { return PartBegin(rank + 1) - PartBegin(rank); }
  int PartOf(size_t element) const;  // the rank whose part it lies in

  size_t SliceElements(int slice) const;
  size_t SliceBegin(int slice) const;
  void RunChunk(const ControlBlock& control, int rank, int ranks, int slice, size_t lo, size_t hi);
  bool ReduceChunk(int ranks, size_t in_begin, int first_out, int outs_count, size_t out_begin, size_t n) const;
  void CopyChunk(int source, size_t from, int target, size_t to, size_t elements) const;
  size_t RoundElements(int ranks) const;
  size_t RoundPart(int r, int ranks, size_t base) const;
  size_t StagedElements(int ranks) const;
  bool RunRounds(const ControlBlock& control, SharedWriter* writer, int rank, int ranks);
  absl::StatusOr<bool> RunFetches(const ControlBlock& control, const PeerWatch& peers, int rank, int ranks);
  void StageIn(const ControlBlock& control, SharedWriter* writer, int rank, int ranks) const;
  void StageReduce(const ControlBlock& control, SharedWriter* writer, int rank, int ranks) const;
  void StageOut(const ControlBlock& control, int rank, int ranks) const;
  absl::Status FetchAndReduce(const ControlBlock& control, const PeerWatch& peers, int rank, int ranks);
  absl::Status FetchResults(const ControlBlock& control, const PeerWatch& peers, int rank, int ranks);
  struct Fetch {
    uint64_t from;  // the peer's own address
    size_t to;      // in `out`, as `bytes`
    size_t bytes;
  };
  Fetch ResultOf(int peer, int rank, int ranks) const;

  Engine* const engine_;
  const OperationKey key_;
  std::optional<OperationKey> called_;
  size_t called_count_ = 0;
  size_t slice_ = 0;  // kDirect: elements of a slice, but for a shorter last one and the root's
  size_t chunk_ = 0;  // kDirect: elements of a chunk, but for a slice's last one
  // kFetched: peers whose results are here, and how much is of this phase's, or the next peer's.
  int peers_fetched_ = 0;
  size_t fetched_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HOST_OPERATION_H_
