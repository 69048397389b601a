// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/health/flight_notes.h"

#include <algorithm>

#include "absl/strings/string_view.h"
#include "libddp/base/spin.h"

namespace ddp {

// A timeline wants exact times; without one they are not worth what they cost.
int64_t FlightNotes::Now() const { return listener_ == nullptr ? CoarseNowNs() : NowNs(); }

void FlightNotes::NoteQueued(const Call& call) const {
  ring_->Queue(call.sequence, call.key.Pack(), call.count, call.bucket, Now());
  if (listener_ != nullptr) TellListener(call, OperationEvent::State::kCalled, 0);
}

void FlightNotes::NoteEntered(const Call& call, FlightState state, int64_t at_ns) const {
  if (at_ns == 0) at_ns = Now();
  ring_->Enter(call.sequence, state, at_ns);
  if (listener_ == nullptr || state < FlightState::kDone) return;
  TellListener(call, state == FlightState::kDone ? OperationEvent::State::kDone : OperationEvent::State::kFailed,
               at_ns);
}

void FlightNotes::TellListener(const Call& call, OperationEvent::State state, int64_t ended_ns) const {
  // Peers may have ended it before this rank saw that it could begin.
  const auto time = [&](FlightState s) {
    const int64_t seen_ns = ring_->TimeOf(call.sequence, s);
    return ended_ns == 0 ? seen_ns : std::min(seen_ns, ended_ns);
  };
  OperationEvent event;
  event.state = state;
  const bool gathers = call.key.kind == OperationKey::Kind::kAllGatherV;
  event.kind = NameOf(gathers ? ddp::Call::Kind::kAllGather : static_cast<ddp::Call::Kind>(call.key.kind));
  event.dtype = call.key.in;
  event.group = group_;
  event.sequence = call.sequence;
  event.count = call.count;
  event.bucket = call.bucket;
  event.called_ns = time(FlightState::kQueued);
  event.announced_ns = time(FlightState::kAnnounced);
  event.ready_ns = time(FlightState::kReady);
  event.ended_ns = ended_ns;
  listener_->OnOperation(event);
}

}  // namespace ddp
