// SPDX-License-Identifier: Apache-2.0
// The receiving side of Channels.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/comm/memory/read_process.h"
#include "libddp/comm/messages/channels.h"

namespace ddp {
namespace {

// Data of at most so many bytes is copied in less time than it takes to release the mutex and lock it again.
constexpr size_t kBriefCopyBytes = size_t{64} << 10;

}  // namespace

Work Channels::Recv(MessageSpec spec) {
  Work work;
  {
    Lock lock(mutex_);
    if (FailedElsewhere()) return failure_;
    auto* const message = new Message(this, std::move(spec));
    message->posted = next_posted_++;
    work = Work(message);
    pending_.fetch_add(1, std::memory_order_relaxed);
    Peer& p = peer(message->peer);
    const auto incoming = std::find_if(p.unexpected.begin(), p.unexpected.end(),
                                       [&](const IncomingPtr& x) { return x->tag == message->tag; });
    if (incoming != p.unexpected.end()) {
      const IncomingPtr found = *incoming;
      p.unexpected.erase(incoming);
      Deliver(found, message);
    } else {
      p.expected.push_back(message);
      ReadEnvelopes(message->peer);
    }
  }
  if (!work.Done()) progress()->Notify();
  return work;
}

// Reads the envelopes that have come from a rank. An eager message with a Recv is copied straight to where it belongs.
bool Channels::ReadEnvelopes(int from) {
  Peer& p = peer(from);
  bool progressed = false;
  while (failure_.ok()) {
    Envelope& e = block_.envelope(from, rank_, p.received);
    if (e.number.load(std::memory_order_acquire) != p.received + 1) break;
    const auto receiver =
        std::find_if(p.expected.begin(), p.expected.end(), [&](const Message* m) { return m->tag == e.tag; });
    if (receiver == p.expected.end()) {
      p.unexpected.push_back(ReadEnvelope(from, e));
    } else {
      Message* const message = *receiver;
      p.expected.erase(receiver);
      if (e.contents != Envelope::Contents::kData) {
        Deliver(ReadEnvelope(from, e), message);
      } else if (Agrees(from, e.count, e.dtype, message)) {
        const size_t bytes = message->data.bytes();
        message->data.CopyIn(0, block_.payload(from, rank_, e, bytes), bytes);
        Finish(message, absl::OkStatus());
      }
    }
    block_.channel(from, rank_).taken.store(++p.received, std::memory_order_release);
    progressed = true;
  }
  return progressed;
}

Channels::IncomingPtr Channels::ReadEnvelope(int from, Envelope& e) {
  auto incoming = std::make_shared<Incoming>();
  incoming->from = from;
  incoming->tag = e.tag;
  incoming->dtype = e.dtype;
  incoming->count = e.count;
  incoming->number = peer(from).received;
  incoming->contents = e.contents;
  if (e.contents == Envelope::Contents::kData) {
    incoming->state = Incoming::State::kComplete;
    incoming->data = std::make_unique<char[]>(incoming->bytes());
    std::memcpy(incoming->data.get(), block_.payload(from, rank_, e, incoming->bytes()), incoming->bytes());
  } else {
    const size_t bytes = e.ranges * sizeof(ListedRange);
    const auto* const list = reinterpret_cast<const ListedRange*>(block_.payload(from, rank_, e, bytes));
    incoming->ranges.assign(list, list + e.ranges);
  }
  return incoming;
}

// False: fails the group, and the receive with it.
bool Channels::Agrees(int from, size_t count, DType dtype, Message* receiver) {
  if (count == receiver->count && dtype == receiver->dtype) return true;
  const auto what = [](size_t n, DType type) {
    return absl::StrCat(std::string(Name(type)), ", ", n, " elements, ", n * SizeOf(type), " bytes");
  };
  FailLocked(absl::FailedPreconditionError(absl::StrCat(
      "ranks disagree about a message: rank ", from, " sends to rank ", rank_, " with tag ", receiver->tag, " (",
      what(count, dtype), "), rank ", rank_, " receives (", what(receiver->count, receiver->dtype),
      "); messages with one tag are received in the order in which they are sent, with equal types and counts")));
  Finish(receiver, failure_);
  return false;
}

void Channels::Deliver(const IncomingPtr& incoming, Message* receiver) {
  if (!Agrees(incoming->from, incoming->count, incoming->dtype, receiver)) return;
  if (incoming->state == Incoming::State::kComplete) {
    receiver->data.CopyIn(0, incoming->data.get(), incoming->bytes());
    Finish(receiver, absl::OkStatus());
    return;
  }
  incoming->receiver = receiver;
  if (incoming->state == Incoming::State::kWaiting) StartFetch(incoming);
}

void Channels::StartFetch(const IncomingPtr& incoming) {
  incoming->state = Incoming::State::kReading;
  fetching_.push_back(incoming);
  pending_.fetch_add(1, std::memory_order_relaxed);
  if (incoming->contents == Envelope::Contents::kNothing ||
      (incoming->contents == Envelope::Contents::kPrivateRanges && peer(incoming->from).cannot_read)) {
    RequestData(incoming);
  }
}

void Channels::RequestData(const IncomingPtr& incoming) {
  incoming->state = Incoming::State::kBouncing;
  QueueReply(*incoming, Reply::kRequestData);
}

void Channels::QueueReply(const Incoming& incoming, uint64_t kind) {
  peer(incoming.from).replies.push_back(Reply::Make(incoming.number, kind));
  pending_.fetch_add(1, std::memory_order_relaxed);
  WriteReplies(incoming.from);
}

bool Channels::WriteReplies(int from) {
  Peer& p = peer(from);
  Channel& channel = block_.channel(from, rank_);
  bool progressed = false;
  while (!p.replies.empty() && HasPlace(p.replied, &p.replies_taken, channel.replies_taken, kReplies)) {
    Reply& reply = channel.replies[p.replied % kReplies];
    reply.what = p.replies.front();
    reply.number.store(++p.replied, std::memory_order_release);
    p.replies.pop_front();
    pending_.fetch_sub(1, std::memory_order_relaxed);
    progressed = true;
  }
  return progressed;
}

bool Channels::FetchAll(Lock& lock) {
  if (fetching_.empty()) return false;
  bool progressed = false;
  const std::vector<IncomingPtr> all = fetching_;  // which may change meanwhile
  for (const IncomingPtr& incoming : all) {
    if (incoming->busy) continue;
    if (incoming->state == Incoming::State::kBouncing) progressed |= FetchFromRing(incoming);
    if (incoming->state == Incoming::State::kReading) progressed |= Fetch(lock, incoming);
  }
  return progressed;
}

// Where the data goes: to the receiver, unless the library fetches it before there is one.
RangeList Channels::Target(const Incoming& incoming) {
  if (incoming.data == nullptr) return incoming.receiver->data;
  RangeList list;
  list.Add(incoming.data.get(), incoming.bytes());
  return list;
}

bool Channels::Fetch(Lock& lock, const IncomingPtr& incoming) {
  const RangeList to = Target(*incoming);
  Message* const receiver = incoming->data == nullptr ? incoming->receiver : nullptr;
  const bool brief = incoming->bytes() <= kBriefCopyBytes;
  incoming->busy = true;
  if (receiver != nullptr) receiver->busy = true;
  if (!brief) lock.unlock();
  const absl::Status status = Copy(*incoming, to);
  if (!brief) lock.lock();
  // A sender that knows of a failure may have written there again.
  std::atomic_thread_fence(std::memory_order_acquire);
  FailedElsewhere();
  incoming->busy = false;
  if (receiver != nullptr) receiver->busy = false;
  if (!failure_.ok()) {
    if (incoming->receiver != nullptr) Finish(incoming->receiver, failure_);
    StopFetch(incoming);
  } else if (status.ok()) {
    QueueReply(*incoming, Reply::kReceived);
    EndFetch(incoming);
  } else if (absl::IsPermissionDenied(status) || absl::IsNotFound(status)) {
    peer(incoming->from).cannot_read |= absl::IsPermissionDenied(status);
    RequestData(incoming);
  } else {
    FailLocked(status);
  }
  return true;
}

// NotFound: this process no longer knows the shared memory.
absl::Status Channels::Copy(const Incoming& incoming, const RangeList& to) {
  RangeList from;
  std::vector<std::shared_ptr<SharedSegment>> keep;
  const bool shared = incoming.contents == Envelope::Contents::kSharedRanges;
  for (const ListedRange& range : incoming.ranges) {
    char* data = reinterpret_cast<char*>(static_cast<uintptr_t>(range.address));
    if (shared) {
      data = AllocationTable::Lookup(allocations_).Resolve(incoming.from, range.address, range.bytes, &keep);
    }
    if (data == nullptr) return absl::NotFoundError("");
    from.Add(data, range.bytes);
  }
  const PeerWatch& peers = engine_.options().peers;
  if (!peers.InThisProcess(incoming.from)) {
    if (!shared) return ReadProcess(incoming.from, peers.pid(incoming.from), from, to);
    from.CopyTo(0, to, 0, incoming.bytes());
    return absl::OkStatus();
  }
  // The sender is a thread of this process, and may free its memory once the group has failed. See DirectRun::Advance.
  std::atomic<uint32_t>& working = control_.peer(rank_).working;
  working.fetch_add(1);
  const bool failed = control_.failure().happened();
  if (!failed) from.CopyTo(0, to, 0, incoming.bytes());
  working.fetch_sub(1);
  return failed ? absl::AbortedError("a peer has failed") : absl::OkStatus();
}

bool Channels::FetchFromRing(const IncomingPtr& incoming) {
  BounceRing& ring = block_.bounce_ring(incoming->from);
  if (ring.message.load(std::memory_order_acquire) != BounceRing::Make(rank_, incoming->number)) return false;
  const RangeList to = Target(*incoming);
  bool progressed = false;
  size_t at = incoming->chunks_received * kBounceBytes;
  while (at < incoming->bytes()) {
    const uint64_t chunk = ring.first + incoming->chunks_received;
    if (ring.filled.load(std::memory_order_acquire) <= chunk) return progressed;
    const size_t n = std::min(kBounceBytes, incoming->bytes() - at);
    to.CopyIn(at, block_.chunk(incoming->from, chunk), n);
    ring.emptied.store(chunk + 1, std::memory_order_release);
    ++incoming->chunks_received;
    at += n;
    progressed = true;
  }
  EndFetch(incoming);
  return true;
}

void Channels::EndFetch(const IncomingPtr& incoming) {
  StopFetch(incoming);
  incoming->state = Incoming::State::kComplete;
  if (incoming->receiver == nullptr) return;
  if (incoming->data != nullptr) incoming->receiver->data.CopyIn(0, incoming->data.get(), incoming->bytes());
  Finish(incoming->receiver, absl::OkStatus());
}

void Channels::StopFetch(const IncomingPtr& incoming) {
  incoming->state = Incoming::State::kWaiting;
  fetching_.erase(std::remove(fetching_.begin(), fetching_.end(), incoming), fetching_.end());
  pending_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace ddp
