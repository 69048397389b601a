// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/messages/channels.h"

#include <sched.h>

#include <algorithm>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/spin.h"
#include "libddp/comm/host/placement.h"
#include "libddp/comm/memory/read_process.h"
#include "libddp/comm/messages/message_order.h"

namespace ddp {
namespace {

// When the library fetches a message that has no Recv yet, so that its sender can go on.
constexpr int64_t kReliefNs = 50'000'000;
// How long the end of a group waits for peers to take its last replies.
constexpr int64_t kLastRepliesNs = 1'000'000'000;

}  // namespace

absl::Status Message::Wait(absl::Time deadline) {
  if (Done()) return status();  // its group may be gone
  return channels_->Wait(
      *this, [this] { return Describe(); }, deadline);
}

std::string Message::Describe() const {
  return absl::StrCat(kind == Kind::kSend ? "send(to rank " : "recv(from rank ", peer, ", tag ", tag, ", ",
                      std::string(Name(dtype)), ", ", count, " elements, ", data.bytes(), " bytes)");
}

Channels::Channels(ChannelBlock block, Engine* engine, ProgressThread* progress)
    : Driver({.name = engine->name(), .oversubscribed = engine->options().oversubscribed}, progress),
      block_(block),
      engine_(*engine),
      control_(engine->options().control),
      allocations_(*engine->options().allocations),
      rank_(engine->options().rank),
      size_(engine->options().size),
      peers_(static_cast<size_t>(size_)) {
  for (int r = 0; r < size_; ++r) {
    peer(r).cannot_read = !MayReadProcesses() || !engine->options().peers.Visible(r);
  }
  SetIdleCallback([this] { engine_.Progress(); });
  progress->Add(this);
}

Channels::~Channels() {
  if (!owner_.IsHere()) return;
  progress()->Remove(this);
  Lock lock(mutex_);
  const int64_t give_up = NowNs() + kLastRepliesNs;
  for (int r = 0; r < size_; ++r) {
    ReadReplies(r);
    while (!peer(r).replies.empty() && failure_.ok() && NowNs() < give_up) {
      if (!WriteReplies(r)) sched_yield();
    }
  }
  // A receiver would take what it sends out of memory that the program has back.
  if (!Pending().empty()) FailLocked(engine_.options().world_ranks.DestroyedError(rank_));
}

// --- sending --------------------------------------------------------------------------------------------------------

Work Channels::Send(MessageSpec spec) {
  const int to = spec.peer;
  Message* message = nullptr;
  {
    Lock lock(mutex_);
    if (FailedElsewhere()) return failure_;
    spec.eager = IsEager(spec.data);
    if (spec.eager && peer(to).unsent.empty() && WriteEnvelope(spec)) return Work();
    message = new Message(this, std::move(spec));
    message->posted = next_posted_++;
    pending_.fetch_add(1, std::memory_order_relaxed);
    peer(to).unsent.push_back(message);
    SendWaiting(to);
  }
  progress()->Notify();
  return Work(message);
}

bool Channels::IsEager(const RangeList& data) const {
  const bool oversubscribed = engine_.options().oversubscribed;
  const size_t bytes = data.bytes();
  return bytes <= std::min(MaxEagerBytes(/*shared=*/false, oversubscribed), block_.most_bytes()) &&
         (bytes <= MaxEagerBytes(/*shared=*/true, oversubscribed) ||
          !AllocationTable::Lookup(allocations_).IsShared(data));
}

// False if no envelope is free.
bool Channels::WriteEnvelope(const MessageSpec& message) {
  const int to = message.peer;
  const RangeList& data = message.data;
  Peer& p = peer(to);
  if (!HasPlace(p.sent, &p.taken, block_.channel(rank_, to).taken, kEnvelopes)) return false;
  Envelope& e = block_.envelope(rank_, to, p.sent);
  e.count = message.count;
  e.tag = message.tag;
  e.dtype = message.dtype;
  e.ranges = 0;
  const size_t bytes = message.eager ? data.bytes() : data.ranges() * sizeof(ListedRange);
  const bool in_ring = !block_.InEnvelope(bytes) && bytes <= block_.most_bytes();
  if (in_ring) e.place = static_cast<uint32_t>(block_.Place(&p.ring_end, bytes));
  if (bytes > block_.most_bytes()) {
    e.contents = Envelope::Contents::kNothing;
  } else if (char* const payload = block_.payload(rank_, to, e, bytes); message.eager) {
    e.contents = Envelope::Contents::kData;
    p.writer.Copy(data, 0, payload, bytes);
  } else {
    auto* const list = reinterpret_cast<ListedRange*>(payload);
    e.ranges = static_cast<uint16_t>(data.ranges());
    e.contents = AllocationTable::Lookup(allocations_).Locate(data, list) ? Envelope::Contents::kSharedRanges
                                                                          : Envelope::Contents::kPrivateRanges;
    if (e.contents == Envelope::Contents::kPrivateRanges) {
      ListedRange* next = list;
      data.ForEach([&](char* begin, size_t size) {
        *next++ = {reinterpret_cast<uintptr_t>(begin), size};
        return true;
      });
    }
  }
  e.number.store(++p.sent, std::memory_order_release);
  return true;
}

bool Channels::SendWaiting(int to) {
  Peer& p = peer(to);
  bool progressed = false;
  while (!p.unsent.empty()) {
    Message* const message = p.unsent.front();
    message->number = p.sent;
    if (!WriteEnvelope(*message)) break;
    p.unsent.pop_front();
    if (message->eager) {
      Finish(message, absl::OkStatus());
    } else {
      p.sent_large.push_back(message);
    }
    progressed = true;
  }
  return progressed;
}

bool Channels::ReadReplies(int to) {
  Peer& p = peer(to);
  Channel& channel = block_.channel(rank_, to);
  bool progressed = false;
  while (true) {
    const Reply& reply = channel.replies[p.replies_seen % kReplies];
    if (reply.number.load(std::memory_order_acquire) != p.replies_seen + 1) return progressed;
    const uint64_t what = reply.what;
    channel.replies_taken.store(++p.replies_seen, std::memory_order_release);
    const auto message = std::find_if(p.sent_large.begin(), p.sent_large.end(),
                                      [&](const Message* m) { return Reply::Make(m->number, what & 1) == what; });
    if (message == p.sent_large.end()) continue;
    Message* const found = *message;
    p.sent_large.erase(message);
    if ((what & 1) == Reply::kRequestData) {
      requested_.push_back(found);
    } else {
      Finish(found, absl::OkStatus());
    }
    progressed = true;
  }
}

// Puts the next chunks of a message into the bounce ring.
bool Channels::FillRing() {
  if (requested_.empty()) return false;
  Message* const message = requested_.front();
  BounceRing& ring = block_.bounce_ring(rank_);
  uint64_t filled = ring.filled.load(std::memory_order_relaxed);
  if (const uint64_t id = BounceRing::Make(message->peer, message->number);
      ring.message.load(std::memory_order_relaxed) != id) {
    if (ring.emptied.load(std::memory_order_acquire) != filled) return false;  // still the message before
    ring.first = filled;
    ring.message.store(id, std::memory_order_release);
  }
  const size_t bytes = message->data.bytes();
  size_t at = message->chunks_sent * kBounceBytes;
  bool progressed = false;
  while (at < bytes && filled - ring.emptied.load(std::memory_order_acquire) < kBounceChunks) {
    const size_t n = std::min(kBounceBytes, bytes - at);
    bounce_writer_.Copy(message->data, at, block_.chunk(rank_, filled), n);
    ring.filled.store(++filled, std::memory_order_release);
    ++message->chunks_sent;
    at += n;
    progressed = true;
  }
  if (at >= bytes) {
    requested_.pop_front();
    Finish(message, absl::OkStatus());
  }
  return progressed;
}

// --- driving --------------------------------------------------------------------------------------------------------

void Channels::Finish(Message* message, absl::Status status) {
  message->Finish(std::move(status));
  pending_.fetch_sub(1, std::memory_order_relaxed);
  message->Unref();
}

bool Channels::Poll(Lock& lock, const Pass&) {
  bool progressed = false;
  for (int r = 0; r < size_ && failure_.ok(); ++r) {
    Peer& p = peer(r);
    if (!p.expected.empty()) progressed |= ReadEnvelopes(r);
    if (!p.sent_large.empty()) progressed |= ReadReplies(r);
    if (!p.unsent.empty()) progressed |= SendWaiting(r);
    if (!p.replies.empty()) progressed |= WriteReplies(r);
  }
  if (failure_.ok()) progressed |= FillRing();
  if (failure_.ok()) progressed |= FetchAll(lock);
  return progressed;
}

// --- failures -------------------------------------------------------------------------------------------------------

std::vector<Message*> Channels::Pending() const {
  std::vector<Message*> all(requested_.begin(), requested_.end());
  for (const Peer& p : peers_) {
    for (const auto* list : {&p.unsent, &p.expected}) all.insert(all.end(), list->begin(), list->end());
    all.insert(all.end(), p.sent_large.begin(), p.sent_large.end());
  }
  for (const IncomingPtr& incoming : fetching_) {
    if (incoming->receiver != nullptr && !incoming->receiver->busy) all.push_back(incoming->receiver);
  }
  return all;
}

// A thread that works on a message without the mutex finishes it when it comes back.
void Channels::FailLocked(const absl::Status& why) {
  if (!failure_.ok()) return;
  engine_.Fail(why);
  failure_ = engine_.status();
  for (const IncomingPtr& incoming : fetching_) {
    if (incoming->receiver == nullptr || incoming->receiver->busy) continue;
    Finish(incoming->receiver, failure_);
    incoming->receiver = nullptr;
  }
  for (Message* message : Pending()) Finish(message, failure_);
  requested_.clear();
  for (Peer& p : peers_) {
    p.unsent.clear();
    p.expected.clear();
    p.sent_large.clear();
    pending_.fetch_sub(static_cast<int>(p.replies.size()), std::memory_order_relaxed);
    p.replies.clear();
  }
  const std::vector<IncomingPtr> all = fetching_;
  for (const IncomingPtr& incoming : all) {
    if (!incoming->busy) StopFetch(incoming);
  }
}

// Whether the group has failed, perhaps at a peer.
bool Channels::FailedElsewhere() {
  if (failure_.ok() && control_.failure().happened()) FailLocked(absl::AbortedError("the group has failed"));
  return !failure_.ok();
}

void Channels::CheckHealth(int64_t now, bool) {
  if (FailedElsewhere()) return;
  control_.peer(rank_).seen_ns.store(now, std::memory_order_relaxed);
  for (int r = 0; r < size_ && failure_.ok(); ++r) ReadEnvelopes(r);
  if (!failure_.ok()) return;
  RelieveSenders(now);
  int64_t longest = -1;
  for (Message* message : OldestOfEach(Pending(), size_)) {
    if (message->noticed_ns == 0) message->noticed_ns = now;
    const int64_t waited = now - message->noticed_ns;
    if (absl::Nanoseconds(waited) > message->timeout) return FailLocked(TimedOut(*message));
    longest = std::max(longest, waited);
  }
  if (longest >= 0) CheckPeers(longest);
}

void Channels::RelieveSenders(int64_t now) {
  for (Peer& p : peers_) {
    for (const IncomingPtr& incoming : p.unexpected) {
      if (incoming->state != Incoming::State::kWaiting) continue;
      if (incoming->noticed_ns == 0) incoming->noticed_ns = now;
      if (now - incoming->noticed_ns < kReliefNs) continue;
      incoming->data.reset(new (std::nothrow) char[incoming->bytes()]);
      if (incoming->data != nullptr) StartFetch(incoming);
    }
  }
}

// A peer that is gone may have completed what this rank waits for: first find out whether it is gone, then whether this
// rank still waits.
void Channels::CheckPeers(int64_t waited_ns) {
  for (const Engine::GonePeer& peer : engine_.GonePeers()) {
    ReadEnvelopes(peer.rank);
    ReadReplies(peer.rank);
    const std::vector<IncomingPtr> all = fetching_;
    for (const IncomingPtr& incoming : all) {
      if (incoming->from == peer.rank && incoming->state == Incoming::State::kBouncing) FetchFromRing(incoming);
    }
    if (!failure_.ok()) return;
    const std::vector<Message*> pending = Pending();
    const auto waiting =
        std::find_if(pending.begin(), pending.end(), [&](const Message* m) { return m->peer == peer.rank; });
    if (waiting == pending.end() && (!peer.died || waited_ns < kDeathGraceNs)) continue;
    const std::string message = waiting == pending.end() ? "" : (*waiting)->Describe();
    return FailLocked(engine_.GoneError(
        peer, absl::StrCat("its part in rank ", rank_, "'s ", message, "; both ranks must make matching calls")));
  }
}

absl::Status Channels::TimedOut(const Message& message) const {
  std::string why;
  if (message.kind == Message::Kind::kSend) {
    why = absl::StrCat("rank ", message.peer, " has not received it");
  } else {
    std::set<std::string> others;
    for (const IncomingPtr& incoming : peers_[static_cast<size_t>(message.peer)].unexpected) {
      if (others.size() < 8) others.insert(absl::StrCat("tag ", incoming->tag, " (", incoming->bytes(), " bytes)"));
    }
    why = absl::StrCat(
        "rank ", message.peer, " has sent nothing with this tag",
        others.empty() ? "" : absl::StrCat("; waiting to be received from it: ", absl::StrJoin(others, ", ")));
  }
  return WithFailedRanks(
      absl::DeadlineExceededError(absl::StrCat(
          "rank ", rank_, ": ", message.Describe(), " timed out after ", absl::FormatDuration(message.timeout), ": ",
          why, "; it is stopped, stuck, slow (DDP_TIMEOUT sets the limit in seconds), or made another call")),
      {message.peer});
}

}  // namespace ddp
