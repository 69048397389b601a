// SPDX-License-Identifier: Apache-2.0
// The execution of one operation, once all ranks have announced it: one class for each Route.
#ifndef LIBDDP_COMM_HOST_RUN_H_
#define LIBDDP_COMM_HOST_RUN_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "libddp/comm/health/peer_watch.h"
#include "libddp/comm/host/control_block.h"
#include "libddp/comm/host/data_map.h"
#include "libddp/comm/host/operation.h"
#include "libddp/comm/host/placement.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/memory/shared_writer.h"

namespace ddp {

// The rank that executes operations, and what it uses for that.
struct RunContext {
  ControlBlock control;
  const PeerWatch* peers = nullptr;
  const AllocationTable* allocations = nullptr;
  SharedWriter* writer = nullptr;  // of this rank's stages
  int rank = 0, size = 1;
  absl::Span<const int> names = {};  // what messages call each rank; empty: its number here
  bool has_threads = false;          // there are peers in this process

  int NameOf(int r) const { return names.empty() ? r : names[static_cast<size_t>(r)]; }
};

// Used by one thread at a time, unless it says otherwise.
class Run {
 public:
  struct Traits {
    bool is_brief = false;     // takes so little time that the engine keeps its mutex
    bool takes_turns = false;  // uses the stages or their counters: one operation at a time, in order
    bool reads_peers = false;  // reads the peers' own memory
  };

  virtual ~Run() = default;

  const Traits traits;

  // Does what can be done without waiting for peers, at most `limit` chunks; with `steal` also what peers have not
  // begun of their part. Returns whether anything was done, or why a peer's memory cannot be read.
  virtual absl::StatusOr<bool> Advance(bool steal, int limit) = 0;
  // Whether this rank has its result, and the peers have what they need of its data.
  virtual bool Done() const = 0;
  // Whether the peer has done its part.
  virtual bool PeerDone(int peer) const = 0;
  // Of those that take turns: how many rounds of the stages they use.
  virtual uint64_t Rounds() const { return 0; }
  // When the last rank's part was done, if that is known.
  virtual int64_t EndedNs() const { return 0; }

 protected:
  Run(const Traits& of, const Operation& operation, const RunContext& host)
      : traits(of), op_(operation), host_(host), map_(operation.key(), operation.count, operation.begins, host.size) {}

  Announcement& announcement(int rank) const { return host_.control.slot(op_.sequence, rank).announcement; }
  // Reduces a piece of all ranks' inputs into this rank's output, and into `copy` unless it is null. A peer's piece
  // begins at others(peer).
  void Reduce(const Piece& piece, absl::FunctionRef<const char*(int)> others, char* copy = nullptr) const;
  // Copies this rank's own part of the result.
  void MoveOwn(const Piece& piece) const {
    op_.in.CopyTo(piece.from * op_.in_size(), op_.out, piece.to * op_.out_size(), piece.elements * op_.in_size());
  }

  const Operation& op_;
  const RunContext& host_;
  const DataMap map_;
};

// Copies what the peers need of this rank's data to where they find it with the announcement.
void PublishInline(const Operation& operation, const RunContext& host, SharedWriter* writer);

std::unique_ptr<Run> MakeInlineRun(const Operation& operation, const RunContext& host);
// FailedPrecondition if a rank uses memory that this one has freed.
absl::StatusOr<std::unique_ptr<Run>> MakeDirectRun(const Operation& operation, const RunContext& host);
// `first_round`: how many rounds of the stages all operations before this one use.
std::unique_ptr<Run> MakeFetchedRun(const Operation& operation, const RunContext& host, uint64_t first_round);
std::unique_ptr<Run> MakeStagedRun(const Operation& operation, const RunContext& host, uint64_t first_round);

absl::StatusOr<std::unique_ptr<Run>> MakeRun(Route route, const Operation& operation, const RunContext& host,
                                             uint64_t first_round);

}  // namespace ddp

#endif  // LIBDDP_COMM_HOST_RUN_H_
