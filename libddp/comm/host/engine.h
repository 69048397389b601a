// SPDX-License-Identifier: Apache-2.0
// The heart of the hierarchical backend: takes operations in the order of the calls, announces them to the peers, and
// gets them done by whichever thread has time.
#ifndef LIBDDP_COMM_HOST_ENGINE_H_
#define LIBDDP_COMM_HOST_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/base/owner_process.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/driver.h"
#include "libddp/comm/base/world_ranks.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/health/flight_notes.h"
#include "libddp/comm/health/peer_watch.h"
#include "libddp/comm/host/control_block.h"
#include "libddp/comm/host/operation.h"
#include "libddp/comm/host/run.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/memory/shared_writer.h"

namespace ddp {

struct EngineOptions {
  int rank = 0;
  int size = 1;
  bool oversubscribed = false;          // more ranks than processors: never spin
  absl::Duration stall_warning;         // zero: none
  ContextObserver* observer = nullptr;  // null for a part of a group, which keeps the flight recorder itself
  uint64_t group = 0;                   // tells this process's groups apart
  ControlBlock control;
  PeerWatch peers;
  AllocationTable* allocations = nullptr;  // what these ranks can reach; outlives the engine
  std::vector<int> names = {};             // what messages call each rank; empty: its number here
  WorldRanks world_ranks = {};             // of those that messages name

  int NameOf(int r) const { return names.empty() ? r : names[static_cast<size_t>(r)]; }
};

// Thread-safe.
class Engine final : public Driver {
 public:
  Engine(EngineOptions options, ProgressThread* progress);
  // Leaves the group. What is unfinished ends with Aborted, and fails the group at the peers.
  ~Engine() override;

  // Takes over the operation (both its references), which has its data, count, kernel and scales.
  Work Launch(Operation* operation);

  // Finds out whether the group has failed or a peer has died; returns status().
  absl::Status CheckHealth();

  // A peer that has left the group or died, and what to say of that: what it has left without, if it has not died.
  struct GonePeer {
    int rank;
    bool died;
  };
  std::vector<GonePeer> GonePeers() const;  // any thread
  absl::Status GoneError(const GonePeer& peer, absl::string_view left_without) const;

  // Fails the group, here and at the peers, unless it has failed already.
  void Fail(const absl::Status& why);
  absl::Status status() const;

  const EngineOptions& options() const { return options_; }
  // What messages call this rank.
  std::string name() const { return options_.world_ranks.NameOf(options_.NameOf(options_.rank)); }
  Observer* listener() const { return notes_.listener(); }

 private:
  // The following are called with the mutex held. Those given the lock may release it for a while.
  bool Poll(Lock& lock, const Pass& pass) override;
  void CheckHealth(int64_t now, bool background) override;
  bool InExchange() const override;
  void Announce();
  bool FreeSlots();
  void AnnounceOne(Operation* operation);
  void Place(Operation* operation, Announcement* a);
  bool Locate(const Operation& operation, Announcement* a);
  bool HasLargeRow(uint64_t sequence);
  bool MustWaitForEarlier(const Operation& operation) const;
  bool Step(Lock& lock, Operation* operation, bool steal, int limit);
  bool HasArrived(Operation* operation) const;
  void StartRun(Operation* operation);
  bool CanReadPeers();
  void Worked(Operation* operation);
  void FinishOk(Operation* operation);
  void Retire();
  void FailLocked(const absl::Status& why);
  bool FailedElsewhere();
  absl::Status DetachOutputs();
  void CheckPeers(int64_t waited_ns);
  absl::Status TimedOut(const Operation& operation) const;
  struct Laggards {
    std::vector<int> missing, unfinished;
    absl::string_view who = "";  // says more about them

    const std::vector<int>& ranks() const { return missing.empty() ? unfinished : missing; }
    std::string Describe() const;  // "did not arrive: rank 1, 3"
  };
  Laggards FindSlotHolders(uint64_t sequence) const;
  Laggards FindLaggards(const Operation& operation, int64_t waited_ns) const;
  void ReportStall(const Operation& oldest, int64_t waited_ns);
  void FailAndReport(const absl::Status& why);
  void ReportFailure(absl::string_view what);
  FlightIncident Incident(bool failure, absl::string_view what) const;
  Operation* OldestPending() const;
  bool HasAnnounced(uint64_t sequence, int rank) const;
  bool Needs(const Operation& operation, int peer) const;
  bool HasPeers(bool in_this_process) const;
  Operation* At(uint64_t sequence) const { return queue_[sequence - first_sequence_]; }

  const EngineOptions options_;
  const ControlBlock& control_ = options_.control;
  const AllocationTable& allocations_ = *options_.allocations;
  const FlightNotes notes_{options_.observer, options_.group, control_.flight(options_.rank)};
  SharedWriter writer_;        // of what goes with announcements
  SharedWriter stage_writer_;  // of whoever has the turn
  const RunContext host_{.control = control_,
                         .peers = &options_.peers,
                         .allocations = &allocations_,
                         .writer = &stage_writer_,
                         .rank = options_.rank,
                         .size = options_.size,
                         .names = options_.names,
                         .has_threads = HasPeers(/*in_this_process=*/true)};
  const bool has_processes_ = HasPeers(/*in_this_process=*/false);
  const uint64_t token_ = static_cast<uint64_t>(NowNs()) ^ reinterpret_cast<uintptr_t>(this);  // see PeerLine

  const OwnerProcess owner_;
  std::deque<Operation*> queue_;                  // not yet retired, in order; one reference each
  uint64_t first_sequence_ = 0;                   // of queue_.front()
  std::atomic<uint64_t> announced_{0};            // operations with a smaller number are known to the peers
  uint64_t slots_free_until_ = control_.slots();  // operations with a smaller number have a slot
  uint64_t staged_rounds_ = 0;                    // of all operations so far
  absl::Status failure_;
  std::optional<bool> can_read_peers_;  // once it has been tried
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HOST_ENGINE_H_
