#include "libddp/comm/channels.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libddp/base/spin.h"
#include "libddp/comm/read_process.h"

namespace ddp {
namespace {

// Up to so many bytes are fetched without letting go of the mutex.
constexpr size_t kBriefBytes = size_t{64} << 10;
// How long a thread that waits looks at one word before it lets others have the mutex: about half a microsecond.
constexpr int kGlances = 32;
// How long the progress thread stays with a pipe that makes no progress.
constexpr int64_t kStayNs = 200'000;

template <typename List, typename T>
void Erase(List& list, const T& value) {
  list.erase(std::remove(list.begin(), list.end(), value), list.end());
}

}  // namespace

absl::Status Message::Wait(absl::Time deadline) { return Done() ? status_ : channels_->Wait(this, deadline); }

std::string Message::Describe() const {
  return absl::StrCat(kind == Kind::kSend ? "send(to rank " : "recv(from rank ", peer, ", tag ", tag, ", ",
                      std::string(Name(dtype)), ", ", count, " elements, ", data.bytes(), " bytes)");
}

Channels::Channels(ChannelBlock block, Engine* engine, ProgressThread* progress)
    : block_(block),
      engine_(*engine),
      control_(engine->options().control),
      rank_(engine->options().rank),
      size_(engine->options().size),
      progress_(progress),
      peers_(static_cast<size_t>(size_)) {
  for (int r = 0; r < size_; ++r) peer(r).no_reading = !MayReadProcesses();
  progress_->Add(this);
}

// --- sending --------------------------------------------------------------------------------------------------------

absl::StatusOr<Work> Channels::Send(MessageSpec spec) {
  const int to = spec.peer;
  Message* message = nullptr;
  {
    Lock lock(mutex_);
    if (FailedElsewhere()) return failure_;
    const bool small = spec.data.bytes() <= block_.payload_bytes();
    if (small && peer(to).unsent.empty() && WriteEnvelope(spec)) return Work();
    message = new Message(this, std::move(spec));
    pending_.fetch_add(1, std::memory_order_relaxed);
    peer(to).unsent.push_back(message);
    SendWaiting(to);
  }
  progress_->Notify();
  return Work(message);
}

// False if there is none free.
bool Channels::WriteEnvelope(const MessageSpec& message) {
  const int to = message.peer;
  const RangeList& data = message.data;
  Peer& p = peer(to);
  if (p.sent - p.taken >= kEnvelopes) {
    p.taken = block_.channel(rank_, to).taken.load(std::memory_order_acquire);
    if (p.sent - p.taken >= kEnvelopes) return false;
  }
  Envelope& e = block_.envelope(rank_, to, p.sent);
  e.count = message.count;
  e.tag = message.tag;
  e.dtype = message.dtype;
  e.ranges = 0;
  if (data.bytes() <= block_.payload_bytes()) {
    e.contents = Envelope::Contents::kData;
    data.CopyOut(0, e.payload(), data.bytes());
  } else if (data.ranges() * sizeof(ListedRange) > block_.payload_bytes()) {
    e.contents = Envelope::Contents::kNothing;
  } else {
    auto* const list = reinterpret_cast<ListedRange*>(e.payload());
    e.ranges = static_cast<uint16_t>(data.ranges());
    e.contents = engine_.Locate(data, list) ? Envelope::Contents::kSharedRanges : Envelope::Contents::kPrivateRanges;
    if (e.contents == Envelope::Contents::kPrivateRanges) {
      ListedRange* next = list;
      data.ForEach([&](char* begin, size_t bytes) {
        *next++ = {reinterpret_cast<uintptr_t>(begin), bytes};
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
    if (message->data.bytes() <= block_.payload_bytes()) {
      Finish(message, absl::OkStatus());
    } else {
      p.sent_large.push_back(message);
    }
    progressed = true;
  }
  return progressed;
}

bool Channels::TakeReplies(int to) {
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
    if ((what & 1) == Reply::kFeed) {
      feeding_.push_back(found);
    } else {
      Finish(found, absl::OkStatus());
    }
    progressed = true;
  }
}

// The next chunks of the message that has the pipe.
bool Channels::Feed() {
  if (feeding_.empty()) return false;
  Message* const message = feeding_.front();
  Pipe& pipe = block_.pipe(rank_);
  uint64_t filled = pipe.filled.load(std::memory_order_relaxed);
  if (const uint64_t id = Pipe::Make(message->peer, message->number);
      pipe.message.load(std::memory_order_relaxed) != id) {
    if (pipe.emptied.load(std::memory_order_acquire) != filled) return false;  // the one before is not through
    pipe.first = filled;
    pipe.message.store(id, std::memory_order_release);
  }
  const size_t bytes = message->data.bytes();
  size_t at = message->fed * kPipeBytes;
  bool progressed = false;
  while (at < bytes && filled - pipe.emptied.load(std::memory_order_acquire) < kPipeChunks) {
    const size_t n = std::min(kPipeBytes, bytes - at);
    message->data.CopyOut(at, block_.chunk(rank_, filled), n);
    pipe.filled.store(++filled, std::memory_order_release);
    ++message->fed;
    at += n;
    progressed = true;
  }
  if (at >= bytes) {
    feeding_.pop_front();
    Finish(message, absl::OkStatus());
  }
  return progressed;
}

// --- receiving ------------------------------------------------------------------------------------------------------

absl::StatusOr<Work> Channels::Recv(MessageSpec spec) {
  Work work;
  {
    Lock lock(mutex_);
    if (FailedElsewhere()) return failure_;
    auto* const message = new Message(this, std::move(spec));
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
  if (!work.Done()) progress_->Notify();
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
        message->data.CopyIn(0, e.payload(), message->data.bytes());
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
    std::memcpy(parcel->data.get(), e.payload(), parcel->bytes());
  } else {
    const auto* const list = reinterpret_cast<const ListedRange*>(e.payload());
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
  peer(parcel->from).replies.push_back(Reply::Make(parcel->number, Reply::kFeed));
  GiveReplies(parcel->from);
}

bool Channels::GiveReplies(int from) {
  Peer& p = peer(from);
  Channel& channel = block_.channel(from, rank_);
  bool progressed = false;
  while (!p.replies.empty() && p.replied - channel.replies_taken.load(std::memory_order_acquire) < kReplies) {
    Reply& reply = channel.replies[p.replied % kReplies];
    reply.what = p.replies.front();
    reply.number.store(++p.replied, std::memory_order_release);
    p.replies.pop_front();
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
  parcel->busy = false;
  if (receiver != nullptr) receiver->busy = false;
  if (!failure_.ok()) {
    if (parcel->receiver != nullptr) Finish(parcel->receiver, failure_);
    Forget(parcel);
  } else if (status.ok()) {
    peer(parcel->from).replies.push_back(Reply::Make(parcel->number, Reply::kReceived));
    GiveReplies(parcel->from);
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
    if (shared) data = engine_.Reach(parcel.from, range.address, range.bytes, &keep);
    if (data == nullptr) return absl::NotFoundError("");
    from.Add(data, range.bytes);
  }
  const PeerWatch& peers = engine_.options().peers;
  if (!peers.InThisProcess(parcel.from)) {
    if (!shared) return ReadProcess(parcel.from, peers.pid(parcel.from), from, to);
    from.CopyTo(0, to, 0, parcel.bytes());
    return absl::OkStatus();
  }
  // A thread: its memory is ours, and free again once its group has failed. See Engine::RunChunks.
  std::atomic<uint32_t>& working = control_.peer(rank_).working;
  working.fetch_add(1);
  const bool failed = control_.failure().state.load() != Failure::kNone;
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
  Erase(fetching_, parcel);
  pending_.fetch_sub(1, std::memory_order_relaxed);
}

// --- driving --------------------------------------------------------------------------------------------------------

void Channels::Finish(Message* message, absl::Status status) {
  message->Finish(std::move(status));
  pending_.fetch_sub(1, std::memory_order_relaxed);
  message->Unref();
}

bool Channels::Drive(Lock& lock) {
  bool progressed = false;
  for (int r = 0; r < size_ && failure_.ok(); ++r) {
    Peer& p = peer(r);
    if (!p.expected.empty()) progressed |= Drain(r);
    if (!p.sent_large.empty()) progressed |= TakeReplies(r);
    if (!p.unsent.empty()) progressed |= SendWaiting(r);
    if (!p.replies.empty()) progressed |= GiveReplies(r);
  }
  if (failure_.ok()) progressed |= Feed();
  if (failure_.ok()) progressed |= FetchAll(lock);
  return progressed;
}

// Whether what the message waited for in the last pass has come.
bool Channels::HasNews(const Message& message) const {
  const Peer& p = peers_[static_cast<size_t>(message.peer)];
  if (message.kind == Message::Kind::kRecv) {
    const Envelope& e = block_.envelope(message.peer, rank_, p.received);
    return e.number.load(std::memory_order_acquire) == p.received + 1;
  }
  const Channel& channel = block_.channel(rank_, message.peer);
  return channel.replies[p.replies_seen % kReplies].number.load(std::memory_order_acquire) == p.replies_seen + 1;
}

absl::Status Channels::Wait(Message* message, absl::Time deadline) {
  const bool oversubscribed = engine_.options().oversubscribed;
  const bool bounded = deadline != absl::InfiniteFuture();
  Backoff backoff(oversubscribed);
  while (true) {
    bool progressed = false;
    {
      Lock lock(mutex_);
      ++driven_;
      if (message->Done()) return message->status();
      progressed = Drive(lock);
      for (int i = 0; i < (oversubscribed || progressed ? 0 : kGlances) && !message->Done(); ++i) {
        if (HasNews(*message)) {
          progressed = Drive(lock);
          break;
        }
        CpuRelax();
      }
      if (message->Done()) return message->status();
      if (!progressed && backoff.TimeToLook()) LookAround();
    }
    if (bounded && absl::Now() >= deadline && !message->Done()) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", rank_, ": ", message->Describe(), " is not done yet; it goes on"));
    }
    if (progressed) {
      backoff = Backoff(oversubscribed);
    } else {
      engine_.Progress();
      backoff.Pause();
    }
  }
}

void Channels::Progress() {
  if (pending_.load(std::memory_order_relaxed) == 0) return;
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  ++driven_;
  Drive(lock);
}

bool Channels::Tick() {
  Lock lock(mutex_);
  // Somebody of the user's threads was at it since the last look: leave it to them.
  int64_t stay_until = NowNs() + kStayNs;
  while (driven_ == driven_at_tick_ && pending_.load(std::memory_order_relaxed) > 0 && failure_.ok()) {
    if (Drive(lock)) {
      stay_until = NowNs() + kStayNs;
      continue;
    }
    const bool in_the_pipe = !feeding_.empty() || !fetching_.empty();
    if (!in_the_pipe || NowNs() > stay_until) break;
    lock.unlock();
    sched_yield();
    lock.lock();
  }
  driven_at_tick_ = driven_;
  LookAround();
  return pending_.load(std::memory_order_relaxed) > 0;
}

}  // namespace ddp
