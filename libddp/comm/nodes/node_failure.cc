// SPDX-License-Identifier: Apache-2.0
// How a group of several nodes notices failures and tells of them.
#include <sched.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/spin.h"
#include "libddp/comm/health/peer_watch.h"
#include "libddp/comm/nodes/node_pipeline.h"

namespace ddp {
namespace {

// How long a rank that leaves a group waits until the others have been told.
constexpr int64_t kLeaveNs = 1'000'000'000;

}  // namespace

void NodePipeline::Fail(const absl::Status& why, bool background) {
  if (!owner_.IsHere()) return;
  const Lock lock = LockToCall();
  FailLocked(why);
  Drive(background, /*steal=*/false);
}

absl::Status NodePipeline::status() const {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  return failure_;
}

// Where only the program's calls may use the wire, silence says nothing.
AbsentRanks NodePipeline::AskNodes() {
  if (!owner_.IsHere()) return {};
  const Lock lock = LockToCall();
  if (!failure_.ok() || !wire_.Usable(/*background=*/true)) return {};
  control_messages_.Ask();
  Drive(/*background=*/true, /*steal=*/false);
  AbsentRanks absent;
  std::set<int> silent;
  for (int r = 0; r < options_.layout.size(); ++r) {
    if (options_.layout.node_of(r) == node()) continue;
    if (control_messages_.departure(r).left) {
      absent.left.push_back(r);
    } else if (!control_messages_.answered(r)) {
      silent.insert(r);
    }
  }
  absent.silent.assign(silent.begin(), silent.end());
  if (!silent.empty()) absent.where = NodesOf(silent);
  return absent;
}

// Whether the group has not failed. It fails with what the wire or messages have found.
bool NodePipeline::Healthy() {
  if (!wire_.status().ok()) FailLocked(wire_.status(), /*tell_nodes=*/false);
  if (!messages_.status().ok()) FailLocked(messages_.status());
  return failure_.ok();
}

void NodePipeline::FailAndReport(const absl::Status& why, bool tell_nodes) {
  if (!failure_.ok()) return;
  ReportFailure(why);
  FailLocked(why, tell_nodes);
}

// The first cause on this node is that of all its ranks; over the wire it travels to the others.
void NodePipeline::FailLocked(const absl::Status& why, bool tell_nodes) {
  if (!failure_.ok()) return;
  reducing_.Fail(why);
  const absl::Status first = reducing_.status();
  spreading_.Fail(first);
  std::lock_guard<std::mutex> lock(launch_mutex_);
  failure_ = first;
  told_ = !tell_nodes;
}

// Detaches what the wire may still read and write from what the user sees. Returns the failure, with more where this
// fails.
absl::Status NodePipeline::Detach(const NodeOperation& operation) {
  absl::Status status;
  const auto part = [&](char* data, size_t bytes) {
    status.Update(options_.allocations->MakePrivate(data, bytes));
    return true;
  };
  if (operation.exposed) {
    operation.in.ForEach(part);
    operation.out.ForEach(part);
  }
  if (status.ok()) return failure_;
  return WithFailedRanks(absl::Status(failure_.code(), absl::StrCat(failure_.message(), "; and ", status.message())),
                         FailedRanks(failure_));
}

// Ends all operations, if the engines have let go of them. What the wire works on stays.
bool NodePipeline::EndPending() {
  TakeLaunched();
  if (!std::all_of(flight_.begin(), flight_.end(), [](const Chunk* c) { return c->LeftEngines(); })) return false;
  flight_.clear();
  for (const NodeOperation* operation : queue_) {
    if (!operation->Done()) notes_.Entered(*operation, FlightState::kFailed);
  }
  if (options_.observer != nullptr && !std::exchange(observer_flushed_, true)) options_.observer->OnGroupFailed();
  for (NodeOperation* operation : queue_) {
    if (!operation->Done()) operation->Finish(Detach(*operation));
    ended_.push_back(operation);
  }
  queue_.clear();
  begun_ = 0;
  messages_.End(failure_);
  NotePending();
  return true;
}

// That a rank of this node has failed the group is known to the engines, also if nothing is pending.
void NodePipeline::CheckHealth(int64_t now, bool background) {
  if (!failure_.ok()) return;
  absl::Status s = reducing_.status();
  if (s.ok()) {
    if (pending_.load(std::memory_order_relaxed) == 0) return;
    s = reducing_.CheckHealth();
  }
  if (s.ok()) s = spreading_.CheckHealth();
  const auto oldest = std::find_if(queue_.begin(), queue_.end(), [](const NodeOperation* o) { return !o->Done(); });
  if (s.ok() && oldest != queue_.end()) s = CheckOldest(*oldest, now);
  if (s.ok()) s = messages_.CheckHealth(now, control_messages_);
  if (s.ok()) return;
  FailAndReport(s);
  TellAndEnd(background);
}

// Whether the oldest operation can still be done, and is in time.
absl::Status NodePipeline::CheckOldest(NodeOperation* oldest, int64_t now) {
  if (oldest->noticed_ns == 0) oldest->noticed_ns = now;
  for (int r = 0; r < options_.layout.size(); ++r) {
    const ControlMessages::Departure& departure = control_messages_.departure(r);
    if (!departure.left || departure.operations > oldest->sequence) continue;
    return WithFailedRanks(
        absl::UnavailableError(LeftText(r, absl::StrCat("taking part in ", oldest->Describe(), kLeftRemedy))), {r});
  }
  const absl::Duration waited = absl::Nanoseconds(now - oldest->noticed_ns);
  bool arrived = false;
  if (waited > oldest->timeout * kNodesShare &&
      (waited > oldest->timeout * kUnknownShare || !Missing(*oldest, &arrived).empty())) {
    return TimedOut(*oldest);
  }
  ReportStall(*oldest, now - oldest->noticed_ns);
  return absl::OkStatus();
}

// The ranks of other nodes that the operation waits for. `arrived`: all of them have made the call.
std::set<int> NodePipeline::Missing(const NodeOperation& operation, bool* arrived) const {
  std::set<int> missing;
  *arrived = true;
  for (const Chunk* chunk : flight_) {
    if (missing.empty() && chunk->operation() == &operation) missing = chunk->Missing(arrived);
  }
  return missing;
}

absl::Status NodePipeline::TimedOut(const NodeOperation& operation) const {
  bool arrived = false;
  const std::set<int> missing = Missing(operation, &arrived);
  return WithFailedRanks(
      absl::DeadlineExceededError(absl::StrCat(
          "rank ", options_.rank, ": ", operation.Describe(), ", timed out after ",
          absl::FormatDuration(operation.timeout), ": ",
          arrived ? "did not finish their part: " : "did not arrive: ", NodesOf(missing),
          "; the node or the link to it is down, or the ranks are stopped, stuck, slow (DDP_TIMEOUT sets the limit in "
          "seconds), or made another call")),
      std::vector<int>(missing.begin(), missing.end()));
}

// "rank 2 on node 1 (host b, ranks 2, 3)"
std::string NodePipeline::NodesOf(const std::set<int>& ranks) const {
  const NodeLayout& layout = options_.layout;
  std::vector<std::string> texts;
  for (int n = 0; n < layout.nodes(); ++n) {
    std::vector<int> here;
    for (const int r : ranks) {
      if (layout.node_of(r) == n) here.push_back(r);
    }
    if (here.empty()) continue;
    const std::vector<int>& all = layout.ranks[static_cast<size_t>(n)];
    texts.push_back(absl::StrCat("rank ", absl::StrJoin(here, ", "), " on node ", n, " (host ",
                                 options_.host_names[static_cast<size_t>(all[0])], ", rank ", absl::StrJoin(all, ", "),
                                 ")"));
  }
  return texts.empty() ? absl::StrCat("ranks of node ", node(), " itself") : absl::StrJoin(texts, ", ");
}

// --- telling --------------------------------------------------------------------------------------------------------

// Sends, once, this rank's failure to all ranks of other nodes, or that it leaves in good order to all ranks.
void NodePipeline::Tell(bool background) {
  if (told_ || !wire_.Usable(background)) return;
  told_ = true;
  control_messages_.Send(failure_, finished_, [this](int r) { return messages_.envelopes_to(r); });
}

// The other nodes are told before the program has its memory back. Where only the program's calls may use the wire, it
// is they that end what is pending, too.
void NodePipeline::TellAndEnd(bool background) {
  Tell(background);
  if (told_ || !background) EndPending();
}

void NodePipeline::Leave() {
  if (!queue_.empty() || messages_.Pending()) FailLocked(world_ranks().DestroyedError(options_.rank));
  if (failure_.ok()) told_ = false;
  // A thread may still be in a part of an operation.
  while (!failure_.ok() && !EndPending()) sched_yield();
  Tell(/*background=*/false);
  if (wire_.Usable(/*background=*/false)) {
    const int64_t until = NowNs() + kLeaveNs;
    while (!(control_messages_.AllSent() && messages_.AllLeft()) && wire_.status().ok() && NowNs() < until) {
      wire_.Poll();
      sched_yield();
    }
    control_messages_.Stop(/*drain=*/failure_.ok());
    messages_.Stop();
    // Once more: of what has been told nothing shall be left to MPI alone, which moves only when it is called.
    wire_.Poll();
  }
  if (wire_.Abandon()) {
    for (NodeOperation* operation : ended_) operation->Unref();
    return;
  }
  // Not freed, ever.
  KeepForever(std::shared_ptr<InFlight>(std::move(in_flight_)));
  KeepForever(options_.segment);
}

// --- reports: each node's of its own ranks, as it cannot read the others' rings -------------------------------------

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

// A stall is reported once on each node, by the lowest rank that waits: the others give it time to.
void NodePipeline::ReportStall(const NodeOperation& oldest, int64_t waited_ns) {
  const int64_t patience = absl::ToInt64Nanoseconds(options_.stall_warning);
  if (options_.observer == nullptr || patience <= 0) return;
  bool arrived = false;
  ReportElection& election = reducing_.options().control.election();
  if (!election.ClaimStall(oldest.sequence, queue_.back()->sequence + 1, local(), waited_ns, patience)) return;
  const std::set<int> missing = Missing(oldest, &arrived);
  const std::string who =
      absl::StrCat("did not arrive, or not finish: ", NodesOf(missing),
                   world_ranks().Note(options_.rank, std::vector<int>(missing.begin(), missing.end())));
  options_.observer->OnIncident(
      Incident(false, StallText(options_.rank, oldest.Describe(), waited_ns, who, oldest.timeout)));
}

// A failure is reported once on each node, by whoever finds it first, and before anybody is let go: a launcher may kill
// the whole job as soon as one rank has ended. An abort by the program is not reported.
void NodePipeline::ReportFailure(const absl::Status& why) {
  if (options_.observer == nullptr || absl::IsAborted(why)) return;
  reducing_.options().control.election().ReportFailure(
      [&] { options_.observer->OnIncident(Incident(true, world_ranks().Named(why, options_.rank).message())); });
}

}  // namespace ddp
