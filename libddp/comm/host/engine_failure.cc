// SPDX-License-Identifier: Apache-2.0
// How the engine notices stalls and failures, and reports them.
#include <sched.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/comm/host/engine.h"

namespace ddp {

void Engine::Fail(const absl::Status& why) {
  if (!owner_.IsHere()) return;
  Lock lock(mutex_);
  FailLocked(why);
}

absl::Status Engine::CheckHealth() {
  Lock lock(mutex_);
  CheckHealth(NowNs(), /*background=*/false);
  return failure_;
}

absl::Status Engine::status() const {
  Lock lock(mutex_);
  return failure_;
}

// The first cause in the group is everybody's: whoever comes second takes the first one's word.
void Engine::FailLocked(const absl::Status& why) {
  if (!failure_.ok()) return;
  const int name = options_.NameOf(options_.rank);
  failure_ = control_.failure().Record(options_.world_ranks.Named(why, name), name);
  if (absl::Status s = DetachOutputs(); !s.ok()) {
    const std::string ranks = PackFailedRanks(failure_);
    failure_ = WithPackedFailedRanks(
        absl::Status(failure_.code(), absl::StrCat(failure_.message(), "; and ", s.message())), ranks);
  }
  for (Operation* operation : queue_) {
    if (operation->Done() || operation->workers > 0) continue;
    notes_.Entered(*operation, FlightState::kFailed);
    operation->Finish(failure_);
  }
  if (options_.observer != nullptr) options_.observer->OnGroupFailed();
}

// Whether the group has failed, perhaps at a peer.
bool Engine::FailedElsewhere() {
  if (failure_.ok() && control_.failure().happened()) FailLocked(absl::AbortedError("the group has failed"));
  return !failure_.ok();
}

// A peer that the failure overtook in the middle of a chunk may wake up at any time and write on: to the outputs of
// operations that are under way, nowhere else. In this process those addresses get other memory with the same contents.
// A peer that is a thread of this process has the same addresses, and may be reading a message out of them, too. It is
// waited for, which does not take longer than a chunk or a message, since it looks at `failure` before it takes another
// (see DirectRun::Advance).
absl::Status Engine::DetachOutputs() {
  absl::Status status;
  for (uint64_t s = first_sequence_; has_processes_ && s < announced_; ++s) {
    if (At(s)->Done()) continue;
    At(s)->out.ForEach([&](char* data, size_t bytes) {
      status.Update(allocations_.MakePrivate(data, bytes));
      return true;
    });
  }
  for (int r = 0; host_.has_threads && r < options_.size; ++r) {
    if (r == options_.rank || !options_.peers.InThisProcess(r)) continue;
    while (control_.peer(r).working.load() != 0) sched_yield();
  }
  return status;
}

void Engine::CheckHealth(int64_t now, bool) {
  if (FailedElsewhere()) return;
  control_.peer(options_.rank).seen_ns.store(now, std::memory_order_relaxed);
  Operation* const oldest = OldestPending();
  if (oldest == nullptr) return;
  if (oldest->noticed_ns == 0) oldest->noticed_ns = now;
  const int64_t waited = now - oldest->noticed_ns;
  CheckPeers(waited);
  if (!failure_.ok()) return;
  if (absl::Nanoseconds(waited) > oldest->timeout) return FailAndReport(TimedOut(*oldest));
  ReportStall(*oldest, waited);
  // A peer that has found a failure leaves the report to this rank, before it lets anybody go.
  if (control_.election().IsAskedToReport(options_.rank)) {
    ReportFailure(absl::StrCat("the group has failed in ", oldest->Describe()));
  }
}

std::vector<Engine::GonePeer> Engine::GonePeers() const {
  std::vector<GonePeer> gone;
  const std::vector<int> dead = options_.peers.Dead();
  for (int r = 0; r < options_.size; ++r) {
    if (r == options_.rank) continue;
    const bool left = control_.peer(r).departed.load(std::memory_order_acquire) != 0;
    if (left || std::find(dead.begin(), dead.end(), r) != dead.end()) gone.push_back({r, !left});
  }
  return gone;
}

// All that have died are to blame, so that nobody goes on with one of them; the text is of one.
absl::Status Engine::GoneError(const GonePeer& peer, absl::string_view left_without) const {
  const int name = options_.NameOf(peer.rank);
  std::vector<int> names = {name};
  for (const GonePeer& other : GonePeers()) {
    if (other.died && other.rank != peer.rank) names.push_back(options_.NameOf(other.rank));
  }
  std::sort(names.begin(), names.end());
  return WithFailedRanks(
      absl::UnavailableError(peer.died ? DiedText(name, options_.peers.pid(peer.rank)) : LeftText(name, left_without)),
      names);
}

void Engine::CheckPeers(int64_t waited_ns) {
  for (const GonePeer& peer : GonePeers()) {
    const auto needs = [&](const Operation* operation) { return !operation->Done() && Needs(*operation, peer.rank); };
    const auto waiting = std::find_if(queue_.begin(), queue_.end(), needs);
    // What a dead rank has announced can still be done without it, unless it took a chunk with it: that shows in time.
    if (waiting == queue_.end() && (!peer.died || waited_ns < kDeathGraceNs)) continue;
    const std::string call = waiting == queue_.end() ? "" : (*waiting)->Describe();
    return FailAndReport(GoneError(peer, absl::StrCat("taking part in ", call, kLeftRemedy)));
  }
}

// Whether the operation cannot be done without something that `peer` has still to do.
bool Engine::Needs(const Operation& operation, int peer) const {
  if (!HasAnnounced(operation.sequence, peer)) return true;
  return operation.run != nullptr && operation.run->traits.takes_turns && !operation.run->PeerDone(peer);
}

bool Engine::HasAnnounced(uint64_t sequence, int rank) const {
  return control_.slot(sequence, rank).announcement.sequence.load(std::memory_order_acquire) == sequence + 1;
}

// Who keeps an operation from being announced: the ring has no slot for it, since the operation that used its slot last
// is not over. A rank that has not announced that one holds up the others.
Engine::Laggards Engine::FindSlotHolders(uint64_t sequence) const {
  const uint64_t slots = control_.slots();
  std::vector<int> missing, unfinished;
  for (int r = 0; r < options_.size; ++r) {
    if (r == options_.rank || control_.peer(r).retired.load(std::memory_order_acquire) + slots > sequence) continue;
    (HasAnnounced(sequence - slots, r) ? unfinished : missing).push_back(options_.NameOf(r));
  }
  return {missing, unfinished};
}

// Who has not done its part? Of an operation that all have announced, counters alone do not tell: a chunk belongs to
// one rank and may have been claimed by another, and a rank that waits for a third one is behind too. But a rank that
// waits says so once in a while.
Engine::Laggards Engine::FindLaggards(const Operation& operation, int64_t waited_ns) const {
  if (operation.sequence >= announced_) return FindSlotHolders(operation.sequence);
  // Without the root's data nobody can go on.
  if (const int root = operation.key().root; operation.IsBroadcast() && !HasAnnounced(operation.sequence, root)) {
    return {{options_.NameOf(root)}, {}, ", the root"};
  }
  const int64_t silent_since = NowNs() - waited_ns / 2;
  std::vector<int> missing, unfinished, silent;
  for (int r = 0; r < options_.size; ++r) {
    if (!HasAnnounced(operation.sequence, r)) {
      missing.push_back(options_.NameOf(r));
    } else if (operation.run != nullptr && !operation.run->PeerDone(r)) {
      unfinished.push_back(options_.NameOf(r));
    }
    if (r != options_.rank && control_.peer(r).seen_ns.load(std::memory_order_relaxed) < silent_since) {
      silent.push_back(options_.NameOf(r));
    }
  }
  return {missing, silent.empty() ? unfinished : silent};
}

std::string Engine::Laggards::Describe() const {
  return absl::StrCat(missing.empty() ? "did not finish their part: rank " : "did not arrive: rank ",
                      absl::StrJoin(ranks(), ", "), who);
}

absl::Status Engine::TimedOut(const Operation& operation) const {
  const Laggards laggards = FindLaggards(operation, absl::ToInt64Nanoseconds(operation.timeout));
  return WithFailedRanks(
      absl::DeadlineExceededError(absl::StrCat(
          "rank ", options_.NameOf(options_.rank), ": ", operation.Describe(), ", timed out after ",
          absl::FormatDuration(operation.called.timeout), ": ", laggards.Describe(),
          "; they are stopped, stuck, slow (DDP_TIMEOUT sets the limit in seconds), or made another call")),
      laggards.ranks());
}

Operation* Engine::OldestPending() const {
  const auto pending = [](const Operation* operation) { return !operation->Done(); };
  const auto found = std::find_if(queue_.begin(), queue_.end(), pending);
  return found == queue_.end() ? nullptr : *found;
}

// --- reports ------------------------------------------------------------------------------------------------------

FlightIncident Engine::Incident(bool failure, absl::string_view what) const {
  FlightIncident incident{.what = what, .failure = failure, .rank = options_.rank, .rings = {}, .dead = {}};
  for (int r = 0; r < options_.size; ++r) incident.rings.push_back(&control_.flight(r));
  incident.dead = options_.peers.Dead();
  return incident;
}

// A stall is reported once, by the lowest rank that waits.
void Engine::ReportStall(const Operation& oldest, int64_t waited_ns) {
  const int64_t patience = absl::ToInt64Nanoseconds(options_.stall_warning);
  if (options_.observer == nullptr || patience <= 0 || waited_ns < patience) return;
  int before = 0;
  for (int r = 0; r < options_.rank; ++r) before += HasAnnounced(oldest.sequence, r);
  const uint64_t end = first_sequence_ + queue_.size();
  if (!control_.election().ClaimStall(oldest.sequence, end, before, waited_ns, patience)) return;
  const Laggards laggards = FindLaggards(oldest, waited_ns);
  const std::string who = absl::StrCat(laggards.Describe(), options_.world_ranks.Note(options_.rank, laggards.ranks()));
  options_.observer->OnIncident(
      Incident(false, StallText(options_.rank, oldest.Describe(), waited_ns, who, oldest.timeout)));
}

// Nobody is let go before the report is out: a launcher may kill the whole job as soon as one rank has ended.
void Engine::FailAndReport(const absl::Status& why) {
  if (!failure_.ok()) return;
  const bool first = !control_.failure().happened();
  if (first && options_.observer != nullptr) {
    const std::vector<int> dead = options_.peers.Dead();
    const Operation* const oldest = OldestPending();
    const auto waits = [&](int r) {
      return oldest != nullptr && HasAnnounced(oldest->sequence, r) &&
             std::find(dead.begin(), dead.end(), r) == dead.end();
    };
    int reporter = 0;
    while (reporter < options_.rank && !waits(reporter)) ++reporter;
    if (reporter != options_.rank) control_.election().AskToReport(reporter);
    ReportFailure(options_.world_ranks.Named(why, options_.NameOf(options_.rank)).message());
  }
  FailLocked(why);
}

void Engine::ReportFailure(absl::string_view what) {
  control_.election().ReportFailure([&] { options_.observer->OnIncident(Incident(true, what)); });
}

}  // namespace ddp
