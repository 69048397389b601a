// How Channels notice failures and tell of them.
#include <sched.h>

#include <algorithm>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/spin.h"
#include "libddp/comm/messages/channels.h"
#include "libddp/comm/messages/message_order.h"

namespace ddp {
namespace {

// When the library takes over a message that nobody has asked for, so that its sender may go on.
constexpr int64_t kReliefNs = 50'000'000;
// How long the end of a group waits for peers to take its last replies.
constexpr int64_t kLastRepliesNs = 1'000'000'000;

}  // namespace

Channels::~Channels() {
  if (!owner_.IsHere()) return;
  progress()->Remove(this);
  Lock lock(mutex_);
  const int64_t give_up = NowNs() + kLastRepliesNs;
  for (int r = 0; r < size_; ++r) {
    while (!peer(r).replies.empty() && failure_.ok() && NowNs() < give_up) {
      if (!GiveReplies(r)) sched_yield();
    }
  }
  const absl::Status destroyed =
      absl::AbortedError(absl::StrCat("rank ", rank_, ": the process group was destroyed with operations pending"));
  for (Message* message : Pending()) Finish(message, destroyed);
}

std::vector<Message*> Channels::Pending() const {
  std::vector<Message*> all(feeding_.begin(), feeding_.end());
  for (const Peer& p : peers_) {
    for (const auto* list : {&p.unsent, &p.expected}) all.insert(all.end(), list->begin(), list->end());
    all.insert(all.end(), p.sent_large.begin(), p.sent_large.end());
  }
  for (const ParcelPtr& parcel : fetching_) {
    if (parcel->receiver != nullptr && !parcel->receiver->busy) all.push_back(parcel->receiver);
  }
  return all;
}

// What a thread is at without the mutex it finishes itself when it comes back.
void Channels::FailLocked(const absl::Status& why) {
  if (!failure_.ok()) return;
  engine_.Fail(why);
  failure_ = engine_.status();
  for (const ParcelPtr& parcel : fetching_) {
    if (parcel->receiver == nullptr || parcel->receiver->busy) continue;
    Finish(parcel->receiver, failure_);
    parcel->receiver = nullptr;
  }
  for (Message* message : Pending()) Finish(message, failure_);
  feeding_.clear();
  for (Peer& p : peers_) {
    p.unsent.clear();
    p.expected.clear();
    p.sent_large.clear();
    pending_.fetch_sub(static_cast<int>(p.replies.size()), std::memory_order_relaxed);
    p.replies.clear();
  }
  const std::vector<ParcelPtr> all = fetching_;
  for (const ParcelPtr& parcel : all) {
    if (!parcel->busy) Forget(parcel);
  }
}

// Whether the group has failed, perhaps at a peer.
bool Channels::FailedElsewhere() {
  if (failure_.ok() && control_.failure().happened()) FailLocked(absl::AbortedError("the group has failed"));
  return !failure_.ok();
}

// Called where waiting has become long: has the group failed, is an operation out of time, has a peer died? And what
// has come that nobody has asked for?
void Channels::CheckHealth(Lock&, bool) {
  if (FailedElsewhere()) return;
  const int64_t now = NowNs();
  if (now < next_look_ns_) return;
  next_look_ns_ = now + kLookEveryNs;
  control_.peer(rank_).seen_ns.store(now, std::memory_order_relaxed);
  for (int r = 0; r < size_ && failure_.ok(); ++r) Drain(r);
  if (!failure_.ok()) return;
  RelieveSenders(now);
  Message* oldest = nullptr;
  for (Message* message : OldestOfEach(Pending(), size_)) {
    if (message->noticed_ns == 0) message->noticed_ns = now;
    if (oldest == nullptr || message->noticed_ns < oldest->noticed_ns) oldest = message;
  }
  if (oldest == nullptr) return;
  const int64_t waited = now - oldest->noticed_ns;
  if (waited > absl::ToInt64Nanoseconds(engine_.options().timeout)) {
    FailLocked(TimedOut(*oldest));
  } else {
    CheckPeers(waited);
  }
}

void Channels::RelieveSenders(int64_t now) {
  for (Peer& p : peers_) {
    for (const ParcelPtr& parcel : p.unexpected) {
      if (parcel->in_hand || parcel->fetching) continue;
      if (parcel->noticed_ns == 0) parcel->noticed_ns = now;
      if (now - parcel->noticed_ns < kReliefNs) continue;
      parcel->data.reset(new (std::nothrow) char[parcel->bytes()]);
      if (parcel->data != nullptr) Want(parcel);
    }
  }
}

// A peer that is gone may have sent, or received, what we wait for: look first whether it is gone, then whether we
// still wait.
void Channels::CheckPeers(int64_t waited_ns) {
  const std::vector<int> dead = engine_.options().peers.Dead();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const bool left = control_.peer(r).departed.load(std::memory_order_acquire) != 0;
    const bool died = !left && std::find(dead.begin(), dead.end(), r) != dead.end();
    if (!left && !died) continue;
    Drain(r);
    TakeReplies(r);
    const std::vector<ParcelPtr> all = fetching_;
    for (const ParcelPtr& parcel : all) {
      if (parcel->from == r && parcel->asked) FetchFromPipe(parcel);
    }
    if (!failure_.ok()) return;
    const std::vector<Message*> pending = Pending();
    const auto waiting = std::find_if(pending.begin(), pending.end(), [&](const Message* m) { return m->peer == r; });
    if (waiting == pending.end() && (left || waited_ns < kDeathGraceNs)) continue;
    FailLocked(WithFailedRanks(
        absl::UnavailableError(
            died ? absl::StrCat("rank ", r, " (process ", engine_.options().peers.pid(r),
                                ") has died; see its own output for the reason, and start the job again")
                 : absl::StrCat("rank ", r, " has left the group without its part in rank ", rank_, "'s ",
                                (*waiting)->Describe(), "; both ranks must make matching calls")),
        {r}));
    return;
  }
}

absl::Status Channels::TimedOut(const Message& message) const {
  std::string why;
  if (message.kind == Message::Kind::kSend) {
    why = absl::StrCat("rank ", message.peer, " has not received it");
  } else {
    std::set<std::string> others;
    for (const ParcelPtr& parcel : peers_[static_cast<size_t>(message.peer)].unexpected) {
      if (others.size() < 8) others.insert(absl::StrCat("tag ", parcel->tag, " (", parcel->bytes(), " bytes)"));
    }
    why = absl::StrCat(
        "rank ", message.peer, " has sent nothing with this tag",
        others.empty() ? "" : absl::StrCat("; waiting to be received from it: ", absl::StrJoin(others, ", ")));
  }
  return WithFailedRanks(
      absl::DeadlineExceededError(
          absl::StrCat("rank ", rank_, ": ", message.Describe(), " timed out after ",
                       absl::FormatDuration(engine_.options().timeout), ": ", why,
                       "; it is stopped, stuck, slow (DDP_TIMEOUT sets the limit in seconds), or made another call")),
      {message.peer});
}

}  // namespace ddp
