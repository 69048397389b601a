// The receiving side of Channels.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/waiting.h"
#include "libddp/comm/memory/read_process.h"
#include "libddp/comm/messages/channels.h"

namespace ddp {

absl::StatusOr<Work> Channels::Recv(MessageSpec spec) {
  Work work;
  {
    Lock lock(mutex_);
    if (FailedElsewhere()) return failure_;
    auto* const message = new Message(this, std::move(spec));
    message->posted = next_posted_++;
    work = Work(message);
    pending_.fetch_add(1, std::memory_order_relaxed);
    Peer& p = peer(message->peer);
    const auto parcel = std::find_if(p.unexpected.begin(), p.unexpected.end(),
                                     [&](const ParcelPtr& x) { return x->tag == message->tag; });
    if (parcel != p.unexpected.end()) {
      const ParcelPtr found = *parcel;
      p.unexpected.erase(parcel);
      Deliver(found, message);
    } else {
      p.expected.push_back(message);
      Drain(message->peer);
    }
  }
  if (!work.Done()) progress()->Notify();
  return work;
}

// Reads the envelopes that have come from a rank. What a small message holds goes straight to where it belongs.
bool Channels::Drain(int from) {
  Peer& p = peer(from);
  bool progressed = false;
  while (failure_.ok()) {
    Envelope& e = block_.envelope(from, rank_, p.received);
    if (e.number.load(std::memory_order_acquire) != p.received + 1) break;
    const auto receiver =
        std::find_if(p.expected.begin(), p.expected.end(), [&](const Message* m) { return m->tag == e.tag; });
    if (receiver == p.expected.end()) {
      p.unexpected.push_back(Open(from, e));
    } else {
      Message* const message = *receiver;
      p.expected.erase(receiver);
      if (e.contents != Envelope::Contents::kData) {
        Deliver(Open(from, e), message);
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

Channels::ParcelPtr Channels::Open(int from, Envelope& e) {
  auto parcel = std::make_shared<Parcel>();
  parcel->from = from;
  parcel->tag = e.tag;
  parcel->dtype = e.dtype;
  parcel->count = e.count;
  parcel->number = peer(from).received;
  parcel->contents = e.contents;
  parcel->in_hand = e.contents == Envelope::Contents::kData;
  if (parcel->in_hand) {
    parcel->data = std::make_unique<char[]>(parcel->bytes());
    std::memcpy(parcel->data.get(), block_.payload(from, rank_, e, parcel->bytes()), parcel->bytes());
  } else {
    const size_t bytes = e.ranges * sizeof(ListedRange);
    const auto* const list = reinterpret_cast<const ListedRange*>(block_.payload(from, rank_, e, bytes));
    parcel->ranges.assign(list, list + e.ranges);
  }
  return parcel;
}

// Otherwise fails the group, and the receive with it.
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

void Channels::Deliver(const ParcelPtr& parcel, Message* receiver) {
  if (!Agrees(parcel->from, parcel->count, parcel->dtype, receiver)) return;
  if (parcel->in_hand) {
    receiver->data.CopyIn(0, parcel->data.get(), parcel->bytes());
    Finish(receiver, absl::OkStatus());
    return;
  }
  parcel->receiver = receiver;
  if (!parcel->fetching) Want(parcel);
}

void Channels::Want(const ParcelPtr& parcel) {
  parcel->fetching = true;
  parcel->asked = false;
  fetching_.push_back(parcel);
  pending_.fetch_add(1, std::memory_order_relaxed);
  if (parcel->contents == Envelope::Contents::kNothing ||
      (parcel->contents == Envelope::Contents::kPrivateRanges && peer(parcel->from).no_reading)) {
    AskForPipe(parcel);
  }
}

void Channels::AskForPipe(const ParcelPtr& parcel) {
  parcel->asked = true;
  Answer(*parcel, Reply::kFeed);
}

void Channels::Answer(const Parcel& parcel, uint64_t kind) {
  peer(parcel.from).replies.push_back(Reply::Make(parcel.number, kind));
  pending_.fetch_add(1, std::memory_order_relaxed);
  GiveReplies(parcel.from);
}

bool Channels::GiveReplies(int from) {
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
  const std::vector<ParcelPtr> all = fetching_;  // which may change meanwhile
  for (const ParcelPtr& parcel : all) {
    if (!parcel->fetching || parcel->busy) continue;
    progressed |= parcel->asked ? FetchFromPipe(parcel) : Fetch(lock, parcel);
  }
  return progressed;
}

// Where the data go: to the receiver, unless the library took them over before there was one.
RangeList Channels::Target(const Parcel& parcel) {
  if (parcel.data == nullptr) return parcel.receiver->data;
  RangeList list;
  list.Add(parcel.data.get(), parcel.bytes());
  return list;
}

bool Channels::Fetch(Lock& lock, const ParcelPtr& parcel) {
  const RangeList to = Target(*parcel);
  Message* const receiver = parcel->data == nullptr ? parcel->receiver : nullptr;
  const bool brief = parcel->bytes() <= kBriefBytes;
  parcel->busy = true;
  if (receiver != nullptr) receiver->busy = true;
  if (!brief) lock.unlock();
  const absl::Status status = Copy(*parcel, to);
  if (!brief) lock.lock();
  // The sender, once told of a failure, may have written there again.
  std::atomic_thread_fence(std::memory_order_acquire);
  FailedElsewhere();
  parcel->busy = false;
  if (receiver != nullptr) receiver->busy = false;
  if (!failure_.ok()) {
    if (parcel->receiver != nullptr) Finish(parcel->receiver, failure_);
    Forget(parcel);
  } else if (status.ok()) {
    Answer(*parcel, Reply::kReceived);
    Fetched(parcel);
  } else if (absl::IsPermissionDenied(status) || absl::IsNotFound(status)) {
    peer(parcel->from).no_reading |= absl::IsPermissionDenied(status);
    AskForPipe(parcel);
  } else {
    FailLocked(status);
  }
  return true;
}

// NotFound: this process does not know the shared memory any more.
absl::Status Channels::Copy(const Parcel& parcel, const RangeList& to) {
  RangeList from;
  std::vector<std::shared_ptr<SharedSegment>> keep;
  const bool shared = parcel.contents == Envelope::Contents::kSharedRanges;
  for (const ListedRange& range : parcel.ranges) {
    char* data = reinterpret_cast<char*>(static_cast<uintptr_t>(range.address));
    if (shared) data = allocations_.Resolve(parcel.from, range.address, range.bytes, &keep);
    if (data == nullptr) return absl::NotFoundError("");
    from.Add(data, range.bytes);
  }
  const PeerWatch& peers = engine_.options().peers;
  if (!peers.InThisProcess(parcel.from)) {
    if (!shared) return ReadProcess(parcel.from, peers.pid(parcel.from), from, to);
    from.CopyTo(0, to, 0, parcel.bytes());
    return absl::OkStatus();
  }
  // A thread: its memory is ours, and free again once its group has failed. See DirectRun::Advance.
  std::atomic<uint32_t>& working = control_.peer(rank_).working;
  working.fetch_add(1);
  const bool failed = control_.failure().happened();
  if (!failed) from.CopyTo(0, to, 0, parcel.bytes());
  working.fetch_sub(1);
  return failed ? absl::AbortedError("a peer has failed") : absl::OkStatus();
}

bool Channels::FetchFromPipe(const ParcelPtr& parcel) {
  Pipe& pipe = block_.pipe(parcel->from);
  if (pipe.message.load(std::memory_order_acquire) != Pipe::Make(rank_, parcel->number)) return false;
  const RangeList to = Target(*parcel);
  bool progressed = false;
  size_t at = parcel->got * kPipeBytes;
  while (at < parcel->bytes()) {
    const uint64_t chunk = pipe.first + parcel->got;
    if (pipe.filled.load(std::memory_order_acquire) <= chunk) return progressed;
    const size_t n = std::min(kPipeBytes, parcel->bytes() - at);
    to.CopyIn(at, block_.chunk(parcel->from, chunk), n);
    pipe.emptied.store(chunk + 1, std::memory_order_release);
    ++parcel->got;
    at += n;
    progressed = true;
  }
  Fetched(parcel);
  return true;
}

void Channels::Fetched(const ParcelPtr& parcel) {
  Forget(parcel);
  parcel->in_hand = true;
  if (parcel->receiver == nullptr) return;
  if (parcel->data != nullptr) parcel->receiver->data.CopyIn(0, parcel->data.get(), parcel->bytes());
  Finish(parcel->receiver, absl::OkStatus());
}

void Channels::Forget(const ParcelPtr& parcel) {
  parcel->fetching = false;
  fetching_.erase(std::remove(fetching_.begin(), fetching_.end(), parcel), fetching_.end());
  pending_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace ddp
