#include "libddp/comm/messages/channels.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/waiting.h"
#include "libddp/comm/host/placement.h"
#include "libddp/comm/memory/read_process.h"

namespace ddp {
absl::Status Message::Wait(absl::Time deadline) {
  return channels_->Wait(
      *this, [this] { return Describe(); }, deadline);
}

std::string Message::Describe() const {
  return absl::StrCat(kind == Kind::kSend ? "send(to rank " : "recv(from rank ", peer, ", tag ", tag, ", ",
                      std::string(Name(dtype)), ", ", count, " elements, ", data.bytes(), " bytes)");
}

Channels::Channels(ChannelBlock block, Engine* engine, ProgressThread* progress)
    : Driver({.rank = engine->options().rank, .oversubscribed = engine->options().oversubscribed}, progress),
      block_(block),
      engine_(*engine),
      control_(engine->options().control),
      allocations_(*engine->options().allocations),
      rank_(engine->options().rank),
      size_(engine->options().size),
      peers_(static_cast<size_t>(size_)) {
  for (int r = 0; r < size_; ++r) {
    peer(r).no_reading = !MayReadProcesses() || !engine->options().peers.Visible(r);
  }
  SetIdleCallback([this] { engine_.Progress(); });
  progress->Add(this);
}

// --- sending --------------------------------------------------------------------------------------------------------

absl::StatusOr<Work> Channels::Send(MessageSpec spec) {
  const int to = spec.peer;
  Message* message = nullptr;
  {
    Lock lock(mutex_);
    if (FailedElsewhere()) return failure_;
    spec.along = GoAlong(spec.data);
    if (spec.along && peer(to).unsent.empty() && WriteEnvelope(spec)) return Work();
    message = new Message(this, std::move(spec));
    message->posted = next_posted_++;
    pending_.fetch_add(1, std::memory_order_relaxed);
    peer(to).unsent.push_back(message);
    SendWaiting(to);
  }
  progress()->Notify();
  return Work(message);
}

bool Channels::GoAlong(const RangeList& data) const {
  const bool oversubscribed = engine_.options().oversubscribed;
  const size_t bytes = data.bytes();
  return bytes <= std::min(MaxEagerBytes(/*shared=*/false, oversubscribed), block_.most_bytes()) &&
         (bytes <= MaxEagerBytes(/*shared=*/true, oversubscribed) || !allocations_.IsShared(data));
}

// False if there is none free.
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
  const size_t bytes = message.along ? data.bytes() : data.ranges() * sizeof(ListedRange);
  const bool in_ring = !block_.InEnvelope(bytes) && bytes <= block_.most_bytes();
  if (in_ring) e.place = static_cast<uint32_t>(block_.Place(&p.ring_end, bytes));
  if (bytes > block_.most_bytes()) {
    e.contents = Envelope::Contents::kNothing;
  } else if (char* const payload = block_.payload(rank_, to, e, bytes); message.along) {
    e.contents = Envelope::Contents::kData;
    p.writer.Copy(data, 0, payload, bytes);
  } else {
    auto* const list = reinterpret_cast<ListedRange*>(payload);
    e.ranges = static_cast<uint16_t>(data.ranges());
    e.contents =
        allocations_.Locate(data, list) ? Envelope::Contents::kSharedRanges : Envelope::Contents::kPrivateRanges;
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
    if (message->along) {
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
    pipe_writer_.Copy(message->data, at, block_.chunk(rank_, filled), n);
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
    if (!p.expected.empty()) progressed |= Drain(r);
    if (!p.sent_large.empty()) progressed |= TakeReplies(r);
    if (!p.unsent.empty()) progressed |= SendWaiting(r);
    if (!p.replies.empty()) progressed |= GiveReplies(r);
  }
  if (failure_.ok()) progressed |= Feed();
  if (failure_.ok()) progressed |= FetchAll(lock);
  return progressed;
}

}  // namespace ddp
