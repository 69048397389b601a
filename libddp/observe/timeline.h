// SPDX-License-Identifier: Apache-2.0
// A timeline of all ranks, as a file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.
#ifndef LIBDDP_OBSERVE_TIMELINE_H_
#define LIBDDP_OBSERVE_TIMELINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ddp/observer.h"
#include "ddp/process_group.h"

namespace ddp {

// One event, in the form in which it travels to rank 0.
struct TimelineEvent {
  enum class Type : uint8_t { kOperation, kBucket, kScope };
  Type type = Type::kScope;
  DType dtype = DType::kFloat32;
  bool failed = false;
  int32_t bucket = -1;
  int32_t label = -1;   // kBucket: index of its RankEvents::labels
  int32_t thread = 0;   // kScope: 0, 1, ... in the order in which threads first had one
  uint32_t group = 0;   // kOperation
  uint64_t number = 0;  // kOperation: the sequence number; kBucket: the step
  uint64_t size = 0;    // kOperation: elements; kBucket: bytes
  // kOperation: called, announced, ready, ended. kBucket: ready, launched, -, done. kScope: begin, -, -, end.
  int64_t ns[4] = {};
  char name[32] = {};
};

// What one rank has to tell.
struct RankEvents {
  std::vector<TimelineEvent> events;
  std::vector<std::string> labels;  // names of a bucket's parameters, without line ends
};

// Where another rank's clock was, seen from rank 0's: `offset_ns` ahead of it when rank 0's showed `at_ns`.
struct ClockReading {
  int64_t at_ns = 0;
  int64_t offset_ns = 0;
};

// One rank's clock against rank 0's, at the begin and at the end of the timeline; between them it drifts evenly.
struct RankClock {
  ClockReading begin, end;
  int64_t ToRank0(int64_t ns) const;
};

// One exchange of all with all: when each rank sent, and when it had heard from everybody, each by its own clock.
struct ClockRound {
  std::vector<int64_t> sent, heard;
};

// By how much the clock of `rank` is ahead of rank 0's. Whoever has heard from all has heard from the other after that
// one had sent, so heard - sent bounds the difference from above, and in the other direction from below; the truth lies
// between the closest bounds. After Cristian 1989, "Probabilistic clock synchronization", with the minimum over rounds
// in place of a threshold. `same_clock`: the ranks are on one host, where 0 is exact unless the bounds exclude it.
int64_t EstimateClockOffset(absl::Span<const ClockRound> rounds, size_t rank, bool same_clock);

// The Chrome trace of the ranks' events, each moved to rank 0's clock, time 0 at the first; `ranks` says whose each
// are.
std::string ChromeTrace(absl::Span<const int> ranks, absl::Span<const RankEvents> events,
                        absl::Span<const RankClock> clocks);

struct TimelineOptions {
  int rank = 0;
  std::string path;
  std::function<int64_t()> now_ns;  // for tests of clocks that differ; unset: NowNs
};

// Collects this rank's events in memory, the newest half million of them. Thread-safe.
class Timeline final : public Observer {
 public:
  explicit Timeline(TimelineOptions options);

  void OnOperation(const OperationEvent& event) noexcept override;
  void OnBucket(const BucketEvent& event) noexcept override;
  void OnScope(const ScopeEvent& event) noexcept override;

  // Collective. Compares clocks, and makes sure that rank 0 can write the file.
  absl::Status Begin(ProcessGroup& world);

  // Collective; the last that is done with the group. Rank 0 gathers all events and writes them. Where that cannot be
  // (the group has failed, or is aborted here because somebody does not come within `patience`), each rank writes its
  // own to a file with ".rankN" appended. After a Begin that failed there is nothing to do.
  absl::Status End(ProcessGroup& world, absl::Duration patience);

  // Writes this rank's events to its own file.
  absl::Status WriteOwn();

 private:
  struct Peer {
    uint64_t host;
    int64_t count;
    int64_t label_bytes;
    int32_t error;  // errno of opening the file (rank 0)
  };

  void Keep(const TimelineEvent& event);  // with the mutex held
  RankEvents Own();
  absl::Status CompareClocks(ProcessGroup& world, absl::Time deadline, std::vector<ClockReading>* readings);
  absl::Status Gather(ProcessGroup& world, absl::Time deadline);

  const TimelineOptions options_;
  std::mutex mutex_, own_file_mutex_;
  std::deque<TimelineEvent> events_;
  uint64_t dropped_ = 0;
  std::vector<std::string> labels_;
  std::vector<int> threads_;  // their system-wide numbers
  uint64_t host_ = 0;
  std::vector<uint64_t> hosts_;
  std::vector<ClockReading> begin_;
};

}  // namespace ddp

#endif  // LIBDDP_OBSERVE_TIMELINE_H_
