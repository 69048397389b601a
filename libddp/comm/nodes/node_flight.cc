// How a group of several nodes tells of stalls and failures: each node of its own ranks, as it cannot read the others'
// rings.
#include <time.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libddp/comm/nodes/node_pipeline.h"

namespace ddp {

FlightIncident NodePipeline::Incident(bool failure, absl::string_view what) const {
  const EngineOptions& engine = reducing_.options();
  FlightIncident incident{.what = what,
                          .failure = failure,
                          .rank = options_.rank,
                          .rings = {},
                          .dead = engine.peers.Dead(),
                          .node = node(),
                          .names = engine.names};
  for (int l = 0; l < engine.size; ++l) incident.rings.push_back(&engine.control.flight(l));
  return incident;
}

// A stall is told once on each node, by the lowest rank that waits: the others give it time to.
void NodePipeline::TellStall(const NodeOperation& oldest, int64_t waited_ns) {
  const int64_t patience = absl::ToInt64Nanoseconds(options_.stall_warning);
  if (options_.observer == nullptr || patience <= 0 || waited_ns - local() * kTellPatienceNs < patience) return;
  std::atomic<uint64_t>& told = reducing_.options().control.desk().stalls;
  uint64_t until = told.load(std::memory_order_relaxed);
  // What is in the queue behind it waits for the same.
  if (until > oldest.sequence || !told.compare_exchange_strong(until, queue_.back()->sequence + 1)) return;
  options_.observer->OnIncident(Incident(
      false,
      absl::StrFormat("rank %d: %s, has been waiting for %.1f s: did not arrive, or not finish: %s; it goes on waiting "
                      "up to the time-out of %s",
                      options_.rank, oldest.Describe(), static_cast<double>(waited_ns) / 1e9, NodesOf(Missing(oldest)),
                      absl::FormatDuration(options_.timeout))));
}

// A failure is told once on each node, by whoever finds it first, and before anybody is let go: a launcher may kill the
// whole job as soon as one rank has ended. An abort by the program is no riddle.
void NodePipeline::TellFailure(const absl::Status& why) {
  if (options_.observer == nullptr || absl::IsAborted(why)) return;
  FlightDesk& desk = reducing_.options().control.desk();
  uint32_t nobody = FlightDesk::kNobody;
  if (desk.failure.compare_exchange_strong(nobody, FlightDesk::kTelling)) {
    options_.observer->OnIncident(Incident(true, why.message()));
    desk.failure.store(FlightDesk::kTold, std::memory_order_release);
    return;
  }
  const int64_t until = NowNs() + kTellPatienceNs;
  while (desk.failure.load(std::memory_order_acquire) != FlightDesk::kTold && NowNs() < until) {
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
  }
}

}  // namespace ddp
