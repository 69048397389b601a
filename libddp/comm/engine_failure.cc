// How the engine notices failures and tells of them.
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/comm/engine.h"

namespace ddp {
namespace {

// Into an array of characters, cut off before the last separator that fits.
void CopyText(absl::string_view text, absl::string_view separator, absl::Span<char> to) {
  if (text.size() >= to.size()) {
    const size_t end = separator.empty() ? absl::string_view::npos : text.rfind(separator, to.size() - 1);
    text = text.substr(0, std::min(end, to.size() - 1));
  }
  std::memcpy(to.data(), text.data(), text.size());
  to[text.size()] = 0;
}

}  // namespace

void Engine::Fail(const absl::Status& why) {
  Lock lock(mutex_);
  FailLocked(why);
}

absl::Status Engine::Look() {
  Lock lock(mutex_);
  LookAround(lock);
  return failure_;
}

absl::Status Engine::status() const {
  Lock lock(mutex_);
  return failure_;
}

// The first cause in the group is everybody's: whoever comes second takes the first one's word.
void Engine::FailLocked(const absl::Status& why) {
  if (!failure_.ok()) return;
  Failure& shared = control_.failure();
  uint32_t none = Failure::kNone;
  failure_ = why;
  if (shared.state.compare_exchange_strong(none, Failure::kBeingWritten)) {
    shared.code = static_cast<int32_t>(why.code());
    CopyText(why.message(), "", absl::MakeSpan(shared.message));
    CopyText(PackFailedRanks(why), ",", absl::MakeSpan(shared.failed_ranks));
    shared.state.store(Failure::kWritten, std::memory_order_release);
  } else {
    // A writer that died in the middle must not hold us up.
    for (int i = 0; i < 1000 && shared.state.load(std::memory_order_acquire) != Failure::kWritten; ++i) sched_yield();
    if (shared.state.load(std::memory_order_acquire) == Failure::kWritten) {
      failure_ = WithPackedFailedRanks(absl::Status(static_cast<absl::StatusCode>(shared.code), shared.message),
                                       shared.failed_ranks);
    }
  }
  if (absl::Status s = KeepLateWritersOut(); !s.ok()) {
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

// A peer that the failure overtook in the middle of a chunk may wake up at any time and write on: to the outputs of
// operations that are under way, nowhere else. In this process those addresses get other memory with the same contents.
// A peer that is a thread of this process has the same addresses; it is waited for, which does not take longer than a
// chunk, since it looks at `failure` before it takes another (see Step).
absl::Status Engine::KeepLateWritersOut() {
  absl::Status status;
  bool under_way = false;
  for (uint64_t s = first_sequence_; s < announced_; ++s) {
    if (At(s)->Done()) continue;
    under_way = true;
    At(s)->out.ForEach([&](char* data, size_t bytes) {
      if (peers_in_other_processes_) status.Update(allocations_.MakePrivate(options_.rank, data, bytes));
      return peers_in_other_processes_;
    });
  }
  for (int r = 0; under_way && peers_in_this_process_ && r < options_.size; ++r) {
    if (r == options_.rank || !options_.peers.InThisProcess(r)) continue;
    while (control_.peer(r).working.load() != 0) sched_yield();
  }
  return status;
}

// Called where waiting has become long: has the group failed elsewhere, is an operation out of time, has a peer died?
void Engine::LookAround(Lock&) {
  if (!failure_.ok()) return;
  if (control_.failure().state.load(std::memory_order_acquire) != Failure::kNone) {
    FailLocked(absl::AbortedError("the group was aborted by a peer that died while it said why"));
    return;
  }
  const int64_t now = NowNs();
  if (now < next_look_ns_) return;
  next_look_ns_ = now + kLookEveryNs;
  control_.peer(options_.rank).seen_ns.store(now, std::memory_order_relaxed);
  for (Operation* operation : queue_) {
    if (!operation->Done() && operation->noticed_ns == 0) operation->noticed_ns = now;
  }
  const Operation* const oldest = OldestPending();
  if (oldest == nullptr) return;
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
                                (*waiting)->Describe(), "; all ranks must make the same calls in the same order")),
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

// Who has not done its part? Of an operation that all have announced, counters alone do not tell: a chunk belongs to
// one rank and may have been claimed by another, and who waits for a third one is behind too. But whoever waits says
// so once in a while.
Engine::Laggards Engine::FindLaggards(const Operation& operation, int64_t waited_ns) const {
  const int64_t silent_since = NowNs() - waited_ns / 2;
  std::vector<int> missing, unfinished, silent;
  for (int r = 0; r < options_.size; ++r) {
    if (!HasAnnounced(operation, r)) {
      missing.push_back(options_.NameOf(r));
    } else if (operation.ready && operation.mode == Operation::Mode::kDirect &&
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
