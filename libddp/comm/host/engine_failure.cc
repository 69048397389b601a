// How the engine notices failures and tells of them.
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
  LookAround();
  return failure_;
}

void Engine::CheckHealth(Lock&, bool) {
  if (!queue_.empty()) LookAround();
}

absl::Status Engine::status() const {
  Lock lock(mutex_);
  return failure_;
}

// The first cause in the group is everybody's: whoever comes second takes the first one's word.
void Engine::FailLocked(const absl::Status& why) {
  if (!failure_.ok()) return;
  failure_ = control_.failure().Record(why, options_.NameOf(options_.rank));
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
// A peer that is a thread of this process has the same addresses; it is waited for, which does not take longer than a
// chunk, since it looks at `failure` before it takes another (see Step).
absl::Status Engine::DetachOutputs() {
  absl::Status status;
  bool under_way = false;
  for (uint64_t s = first_sequence_; s < announced_; ++s) {
    if (At(s)->Done()) continue;
    under_way = true;
    At(s)->out.ForEach([&](char* data, size_t bytes) {
      if (peers_in_other_processes_) status.Update(allocations_.MakePrivate(data, bytes));
      return peers_in_other_processes_;
    });
  }
  for (int r = 0; under_way && peers_in_this_process_ && r < options_.size; ++r) {
    if (r == options_.rank || !options_.peers.InThisProcess(r)) continue;
    while (control_.peer(r).working.load() != 0) sched_yield();
  }
  return status;
}

void Engine::LookAround() {
  if (FailedElsewhere()) return;
  const int64_t now = NowNs();
  if (now < next_look_ns_) return;
  next_look_ns_ = now + kLookEveryNs;
  control_.peer(options_.rank).seen_ns.store(now, std::memory_order_relaxed);
  Operation* const oldest = OldestPending();
  if (oldest == nullptr) return;
  if (oldest->noticed_ns == 0) oldest->noticed_ns = now;
  const int64_t waited = now - oldest->noticed_ns;
  CheckPeers(waited);
  if (!failure_.ok()) return;
  if (waited > absl::ToInt64Nanoseconds(options_.timeout)) return FailAndTell(TimedOut(*oldest));
  TellStall(*oldest, waited);
  // A peer that has found a failure leaves it to us to tell of it, before it lets anybody go.
  if (control_.desk().teller.load(std::memory_order_acquire) == static_cast<uint32_t>(options_.rank) + 1) {
    TellFailure(absl::StrCat("the group has failed in ", oldest->Describe()));
  }
}

void Engine::CheckPeers(int64_t waited_ns) {
  const std::vector<int> dead = options_.peers.Dead();
  for (int r = 0; r < options_.size; ++r) {
    if (r == options_.rank) continue;
    const bool left = control_.peer(r).departed.load(std::memory_order_acquire) != 0;
    const bool died = !left && std::find(dead.begin(), dead.end(), r) != dead.end();
    if (!left && !died) continue;
    const auto needs = [&](const Operation* operation) { return !operation->Done() && Needs(*operation, r); };
    const auto waiting = std::find_if(queue_.begin(), queue_.end(), needs);
    if (left && waiting == queue_.end()) continue;
    // What a dead rank has announced can still be done without it, unless it took a chunk with it: that shows in
    // time.
    if (died && waiting == queue_.end() && waited_ns < kDeathGraceNs) continue;
    FailAndTell(WithFailedRanks(
        absl::UnavailableError(
            died ? absl::StrCat("rank ", options_.NameOf(r), " (process ", options_.peers.pid(r),
                                ") has died; see its own output for the reason, and start the job again")
                 : absl::StrCat("rank ", options_.NameOf(r), " has left the group without taking part in ",
                                (*waiting)->Describe(), kLeftRemedy)),
        {options_.NameOf(r)}));
    return;
  }
}

// Whether the operation cannot be done without something that `peer` has still to do.
bool Engine::Needs(const Operation& operation, int peer) const {
  if (!HasAnnounced(operation, peer)) return true;
  if (!operation.ready || !operation.TakesTurns()) return false;
  const uint64_t rounds = operation.first_round + operation.Rounds(options_.size);
  return (control_.peer(peer).*operation.DoneCounter()).load(std::memory_order_acquire) < rounds;
}

bool Engine::HasAnnounced(const Operation& operation, int rank) const {
  return control_.slot(operation.sequence, rank).announcement.sequence.load(std::memory_order_acquire) ==
         operation.sequence + 1;
}

// Who keeps an operation from being announced: the ring has no slot for it, since the operation that used its slot last
// is not over. A rank that has not announced that one holds up the others.
Engine::Laggards Engine::FindSlotHolders(uint64_t sequence) const {
  const uint64_t slots = control_.slots();
  std::vector<int> missing, unfinished;
  for (int r = 0; r < options_.size; ++r) {
    if (r == options_.rank || control_.peer(r).retired.load(std::memory_order_acquire) + slots > sequence) continue;
    const uint64_t last = control_.slot(sequence, r).announcement.sequence.load(std::memory_order_acquire);
    (last + slots == sequence + 1 ? unfinished : missing).push_back(options_.NameOf(r));
  }
  if (!missing.empty()) return {absl::StrCat("did not arrive: rank ", absl::StrJoin(missing, ", ")), missing};
  return {absl::StrCat("did not finish their part: rank ", absl::StrJoin(unfinished, ", ")), unfinished};
}

// Who has not done its part? Of an operation that all have announced, counters alone do not tell: a chunk belongs to
// one rank and may have been claimed by another, and who waits for a third one is behind too. But whoever waits says
// so once in a while.
Engine::Laggards Engine::FindLaggards(const Operation& operation, int64_t waited_ns) const {
  if (operation.sequence >= announced_) return FindSlotHolders(operation.sequence);
  // Without the root's data nobody can go on.
  if (const int root = operation.key().root; operation.IsBroadcast() && !HasAnnounced(operation, root)) {
    return {absl::StrCat("did not arrive: rank ", options_.NameOf(root), ", the root"), {options_.NameOf(root)}};
  }
  const int64_t silent_since = NowNs() - waited_ns / 2;
  std::vector<int> missing, unfinished, silent;
  for (int r = 0; r < options_.size; ++r) {
    if (Needs(operation, r) && !HasAnnounced(operation, r)) {
      missing.push_back(options_.NameOf(r));
    } else if (operation.ready && operation.route == Route::kDirect &&
               control_.slot(operation.sequence, r).done.load(std::memory_order_acquire) !=
                   operation.chunks[static_cast<size_t>(r)]) {
      unfinished.push_back(options_.NameOf(r));
    } else if (Needs(operation, r)) {
      unfinished.push_back(options_.NameOf(r));
    }
    if (r != options_.rank && control_.peer(r).seen_ns.load(std::memory_order_relaxed) < silent_since) {
      silent.push_back(options_.NameOf(r));
    }
  }
  if (!missing.empty()) return {absl::StrCat("did not arrive: rank ", absl::StrJoin(missing, ", ")), missing};
  const std::vector<int>& ranks = silent.empty() ? unfinished : silent;
  return {absl::StrCat("did not finish their part: rank ", absl::StrJoin(ranks, ", ")), ranks};
}

absl::Status Engine::TimedOut(const Operation& operation) const {
  const Laggards laggards = FindLaggards(operation, absl::ToInt64Nanoseconds(options_.timeout));
  return WithFailedRanks(
      absl::DeadlineExceededError(absl::StrCat(
          "rank ", options_.NameOf(options_.rank), ": ", operation.Describe(), ", timed out after ",
          absl::FormatDuration(options_.timeout), ": ", laggards.text,
          "; they are stopped, stuck, slow (DDP_TIMEOUT sets the limit in seconds), or made another call")),
      laggards.ranks);
}

}  // namespace ddp
