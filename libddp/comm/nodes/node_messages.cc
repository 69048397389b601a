// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nodes/node_messages.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/comm/health/peer_watch.h"
#include "libddp/comm/messages/message_order.h"

namespace ddp {
namespace {

// Up to so many bytes a message is done as soon as it is copied.
constexpr size_t kSmallBytes = 2048;
// A message goes over the wire in pieces of so many bytes.
constexpr size_t kPieceBytes = size_t{256} << 20;

std::string What(DType dtype, size_t count) {
  return absl::StrCat(std::string(Name(dtype)), ", ", count, " elements, ", count * SizeOf(dtype), " bytes");
}

}  // namespace

std::string NodeMessage::Describe() const {
  return absl::StrCat(is_send_ ? "send(to rank " : "recv(from rank ", peer, ", tag ", tag, ", ", What(dtype, count),
                      ")");
}

NodeMessages::NodeMessages(NodePipeline* pipeline, NodeWire* wire, int rank, int ranks)
    : pipeline_(pipeline),
      wire_(*wire),
      rank_(rank),
      ranks_(ranks),
      sent_(static_cast<size_t>(ranks)),
      received_from_(static_cast<size_t>(ranks)) {}

NodeMessage* NodeMessages::Make(bool send, NodeMessageSpec spec) {
  auto* const message = new NodeMessage(pipeline_, send, std::move(spec));
  message->posted = next_posted_++;
  ++pending_;
  return message;
}

Work NodeMessages::Send(NodeMessageSpec spec) {
  auto parcel = std::make_unique<Parcel>();
  parcel->peer = spec.peer;
  parcel->envelope.tag = spec.tag;
  parcel->envelope.dtype = spec.dtype;
  parcel->envelope.count = spec.count;
  parcel->envelope.number = next_number_++;
  parcel->data.reset(new (std::nothrow) char[spec.bytes()]);
  if (parcel->data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("rank ", rank_, ": no memory for the copy of a ", "message of ",
                                                     spec.bytes(), " bytes; send less at a time"));
  }
  spec.data.CopyOut(0, parcel->data.get(), spec.bytes());
  Work work;
  if (spec.bytes() > kSmallBytes) {
    parcel->owner = Make(/*send=*/true, std::move(spec));
    work = Work(parcel->owner);
  }
  SendEnvelope(parcel.get());
  Post(parcel.get(), /*send=*/true);
  outgoing_.push_back(std::move(parcel));
  return work;
}

Work NodeMessages::Recv(NodeMessageSpec spec) {
  NodeMessage* const message = Make(/*send=*/false, std::move(spec));
  Work work(message);
  const auto found = std::find_if(incoming_.begin(), incoming_.end(), [&](const ParcelPtr& p) {
    return p->owner == nullptr && p->peer == message->peer && p->envelope.tag == message->tag;
  });
  expected_.push_back(message);
  if (found != incoming_.end()) Match(found->get(), message);
  return work;
}

void NodeMessages::SendEnvelope(Parcel* parcel) {
  ++sent_[static_cast<size_t>(parcel->peer)];
  wire_.Send(&parcel->transfers, parcel->peer, WireTag::kEnvelope, &parcel->envelope, sizeof(Envelope));
}

void NodeMessages::Post(Parcel* parcel, bool send) {
  const size_t bytes = parcel->envelope.bytes();
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    char* const piece = parcel->data.get() + at;
    const size_t size = std::min(kPieceBytes, bytes - at);
    if (send) {
      wire_.Send(&parcel->transfers, parcel->peer, WireTag::kPayload, piece, size);
    } else {
      wire_.Receive(&parcel->transfers, parcel->peer, WireTag::kPayload, piece, size);
    }
  }
}

// The receive takes the message, if they agree; otherwise the group fails.
void NodeMessages::Match(Parcel* parcel, NodeMessage* receiver) {
  const Envelope& e = parcel->envelope;
  if (e.count != receiver->count || e.dtype != receiver->dtype) {
    return status_.Update(absl::FailedPreconditionError(absl::StrCat(
        "ranks disagree about a message: rank ", parcel->peer, " sends to rank ", rank_, " with tag ", e.tag, " (",
        What(e.dtype, e.count), "), rank ", rank_, " receives (", What(receiver->dtype, receiver->count),
        "); messages with one tag are received in the order in which they are sent, with equal types and counts")));
  }
  parcel->owner = receiver;
  expected_.erase(std::find(expected_.begin(), expected_.end(), receiver));
}

void NodeMessages::TakeEnvelope() {
  const int from = wire_.PeerOf(receive_);
  ++received_from_[static_cast<size_t>(from)];
  if (received_.reply) {
    for (const ParcelPtr& parcel : outgoing_) {
      if (!parcel->envelope.reply && parcel->envelope.number == received_.number) parcel->arrived = true;
    }
    return;
  }
  auto parcel = std::make_unique<Parcel>();
  parcel->peer = from;
  parcel->envelope = received_;
  parcel->data.reset(new (std::nothrow) char[received_.bytes()]);
  if (parcel->data == nullptr) {
    return status_.Update(
        absl::ResourceExhaustedError(absl::StrCat("rank ", rank_, ": no memory for a message of ", received_.bytes(),
                                                  " bytes from rank ", from, "; send less at a time")));
  }
  Post(parcel.get(), /*send=*/false);
  incoming_.push_back(std::move(parcel));
  const auto found = std::find_if(expected_.begin(), expected_.end(), [&](const NodeMessage* message) {
    return message->peer == from && message->tag == received_.tag;
  });
  if (found != expected_.end()) Match(incoming_.back().get(), *found);
}

bool NodeMessages::Advance() {
  bool progressed = false;
  if (receive_.done) {
    TakeEnvelope();
    progressed = true;
  }
  if (progressed || receive_.data == nullptr) {
    wire_.ReceiveFromAny(&receive_, WireTag::kEnvelope, &received_, sizeof received_);
  }
  for (size_t i = 0; i < incoming_.size(); ++i) {
    Parcel& parcel = *incoming_[i];
    if (!parcel.arrived && AllDone(parcel.transfers)) {
      parcel.arrived = progressed = true;
      if (parcel.envelope.bytes() > kSmallBytes) {
        auto reply = std::make_unique<Parcel>();
        reply->peer = parcel.peer;
        reply->envelope.number = parcel.envelope.number;
        reply->envelope.reply = true;
        SendEnvelope(reply.get());
        outgoing_.push_back(std::move(reply));
      }
    }
    if (!parcel.arrived || parcel.owner == nullptr) continue;
    parcel.owner->data.CopyIn(0, parcel.data.get(), parcel.envelope.bytes());
    parcel.owner->End(absl::OkStatus());
    --pending_;
    incoming_.erase(incoming_.begin() + static_cast<ptrdiff_t>(i--));
    progressed = true;
  }
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    Parcel& parcel = *outgoing_[i];
    if (!AllDone(parcel.transfers) || (parcel.owner != nullptr && !parcel.arrived)) continue;
    if (parcel.owner != nullptr) {
      parcel.owner->End(absl::OkStatus());
      --pending_;
    }
    outgoing_.erase(outgoing_.begin() + static_cast<ptrdiff_t>(i--));
    progressed = true;
  }
  return progressed;
}

bool NodeMessages::AllLeft() const {
  return std::all_of(outgoing_.begin(), outgoing_.end(), [](const ParcelPtr& p) { return AllDone(p->transfers); });
}

std::vector<NodeMessage*> NodeMessages::Unfinished() const {
  std::vector<NodeMessage*> all = expected_;
  for (const auto* parcels : {&outgoing_, &incoming_}) {
    for (const ParcelPtr& parcel : *parcels) {
      if (parcel->owner != nullptr) all.push_back(parcel->owner);
    }
  }
  return all;
}

absl::Status NodeMessages::CheckHealth(int64_t now, const ControlMessages& control) {
  const std::vector<NodeMessage*> unfinished = Unfinished();
  for (NodeMessage* message : unfinished) {
    // All that it had sent has come: there will be nothing more.
    const ControlMessages::Departure& departure = control.departure(message->peer);
    const bool waits_for_more =
        message->is_send() || std::find(expected_.begin(), expected_.end(), message) != expected_.end();
    if (departure.left && waits_for_more && received_from_[static_cast<size_t>(message->peer)] == departure.envelopes) {
      return WithFailedRanks(absl::UnavailableError(LeftText(
                                 message->peer, absl::StrCat("its part in rank ", rank_, "'s ", message->Describe(),
                                                             "; both ranks must make matching calls"))),
                             {message->peer});
    }
  }
  for (NodeMessage* message : OldestOfEach(unfinished, ranks_)) {
    if (message->noticed_ns == 0) message->noticed_ns = now;
    if (absl::Nanoseconds(now - message->noticed_ns) > message->timeout) return TimedOut(*message);
  }
  return absl::OkStatus();
}

absl::Status NodeMessages::TimedOut(const NodeMessage& message) const {
  std::set<std::string> others;
  for (const ParcelPtr& parcel : incoming_) {
    if (message.is_send() || parcel->owner != nullptr || parcel->peer != message.peer || others.size() == 8) continue;
    others.insert(absl::StrCat("tag ", parcel->envelope.tag, " (", parcel->envelope.bytes(), " bytes)"));
  }
  return WithFailedRanks(
      absl::DeadlineExceededError(absl::StrCat(
          "rank ", rank_, ": ", message.Describe(), " timed out after ", absl::FormatDuration(message.timeout),
          ": rank ", message.peer, message.is_send() ? " has not received it" : " has sent nothing with this tag",
          others.empty() ? "" : absl::StrCat("; waiting to be received from it: ", absl::StrJoin(others, ", ")),
          "; it is stopped, stuck, slow (DDP_TIMEOUT sets the limit in seconds), or makes no matching call")),
      {message.peer});
}

void NodeMessages::End(const absl::Status& why) {
  for (NodeMessage* message : Unfinished()) message->End(why);
  expected_.clear();
  for (auto* parcels : {&outgoing_, &incoming_}) {
    for (const ParcelPtr& parcel : *parcels) parcel->owner = nullptr;
  }
  pending_ = 0;
}

void NodeMessages::Stop() {
  if (receive_.data != nullptr && !receive_.done) wire_.Cancel(&receive_);
}

}  // namespace ddp
