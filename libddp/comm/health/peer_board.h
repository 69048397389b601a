// SPDX-License-Identifier: Apache-2.0
// Where the ranks of one host tell each other which operation they are at, and why the group has failed: what a backend
// needs whose transport says neither.
#ifndef LIBDDP_COMM_HEALTH_PEER_BOARD_H_
#define LIBDDP_COMM_HEALTH_PEER_BOARD_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"
#include "libddp/base/owner_process.h"
#include "libddp/base/page.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/health/flight_ring.h"
#include "libddp/comm/health/peer_watch.h"
#include "libddp/comm/health/report_election.h"
#include "libddp/comm/health/shared_failure.h"
#include "libddp/comm/memory/shared_segment.h"

namespace ddp {

struct OperationKey;

// One operation, as its ranks must agree on it.
struct BoardEntry {
  uint64_t what = 0;   // OperationKey::Pack
  uint64_t count = 0;  // elements
  uint64_t shape = 0;  // a hash of everything else that has to be equal
};

// Ranks on other hosts are not on the board: nothing is known about them here. Posting takes some stores; the rest is
// for whoever waits. Thread-safe but for Post, which one thread at a time calls.
class PeerBoard {
 public:
  // Collective over `group`, which is used for this alone. `host`: equal on the ranks of one host.
  static absl::StatusOr<std::unique_ptr<PeerBoard>> Create(ProcessGroup& group, const std::string& host = HostId());
  // Says that this rank has left in good order.
  ~PeerBoard();

  // This rank has come to operation `sequence`; they are posted in order.
  void Post(uint64_t sequence, const BoardEntry& entry);
  // This rank makes a collective call on CPU memory, which is not on the board. Thread-safe.
  void PostHostCall(const OperationKey& key, uint64_t count);

  // Whether a peer's operation of that number is another one than `mine`, which this rank posted: what is wrong, with
  // both sides. Of a peer that has posted kRing more since it is not known any more.
  std::optional<std::string> Disagreement(uint64_t sequence, const BoardEntry& mine) const;
  // Whether a peer makes a call on CPU memory in place of operation `sequence`, of which this rank has posted `entry`.
  std::optional<std::string> CallsOnHost(uint64_t sequence, const BoardEntry& entry) const;

  // The ranks of this host that have not come to the operation.
  std::vector<int> Missing(uint64_t sequence) const;

  // The streams of this rank know that the group has failed. Then, where its cause is told: waits, not for long, until
  // those of the other ranks know it that are still there.
  void PostFailed() { line(place_).failed.store(1, std::memory_order_release); }
  void LetThemKnow();

  // This rank has begun to run so many captured sequences of operations; the ranks of this host that have begun fewer.
  void PostGraphs(uint32_t begun) { line(place_).graphs.store(begun, std::memory_order_relaxed); }
  std::vector<int> MissingGraphs(uint32_t begun) const;

  // This rank's operations, and who tells of them, for the flight recorder.
  FlightRing& flight() const { return line(place_).flight; }
  // A stall of operation `sequence`, for which this rank has waited so long, is told once on this host, by the lowest
  // rank that waits: the others give it time to. True on the rank that is to tell it.
  bool ShouldTellStall(uint64_t sequence, int64_t waited_ns, int64_t patience_ns) const;
  // Tells of the failure, unless another rank of this host has; then waits a short while until it is told.
  void TellFailure(const absl::Status& why, ContextObserver& observer);
  FlightIncident Incident(bool failure, absl::string_view what);

  // Unavailable if ranks of this host are gone, which it names: their process has ended without leaving, or they have
  // left without coming to `sequence`.
  absl::Status Gone(uint64_t sequence);

  // Makes `why` the group's cause of failure on this host, unless there is one already; returns the one that counts.
  absl::Status Fail(const absl::Status& why) { return shared_failure().Record(why, rank_); }
  // What some rank of this host failed with; OK if none did.
  absl::Status failure() const { return shared_failure().cause(); }

 private:
  // More than a rank is ahead of another as a rule before the slower one looks: only captured operations are not waited
  // for.
  static constexpr uint64_t kRing = 256;
  struct Slot {
    std::atomic<uint64_t> number{0};  // sequence + 1, once the entry is whole
    std::atomic<uint64_t> what{0}, count{0}, shape{0};
  };
  struct Line {
    alignas(kCacheLine) std::atomic<uint64_t> posted{0};  // operations so far
    std::atomic<uint32_t> departed{0}, failed{0}, graphs{0};
    std::atomic<uint64_t> host_calls{0}, host_what{0}, host_count{0};  // so far; the last one
    alignas(kCacheLine) Slot ring[kRing];
    FlightRing flight;
  };

  PeerBoard() = default;
  bool OthersFailed();                                                              // all that are still there
  std::vector<int> Dead();                                                          // places
  static constexpr size_t kLines = sizeof(SharedFailure) + sizeof(ReportElection);  // where they begin
  static size_t Bytes(size_t ranks) { return kLines + ranks * sizeof(Line); }
  Line& line(size_t place) const { return reinterpret_cast<Line*>(memory_->data() + kLines)[place]; }
  ReportElection& election() const {
    return *reinterpret_cast<ReportElection*>(memory_->data() + sizeof(SharedFailure));
  }
  SharedFailure& shared_failure() const { return *reinterpret_cast<SharedFailure*>(memory_->data()); }

  const OwnerProcess owner_;
  int rank_ = 0;
  size_t place_ = 0;          // this rank's line
  std::vector<int> ranks_;    // of this host; their places
  bool other_hosts_ = false;  // have ranks, too
  std::shared_ptr<SharedSegment> memory_;
  std::mutex watch_mutex_;
  PeerWatch watch_;  // by place
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HEALTH_PEER_BOARD_H_
