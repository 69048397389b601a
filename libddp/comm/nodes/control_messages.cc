// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nodes/control_messages.h"

#include <algorithm>
#include <utility>

namespace ddp {

absl::Status ControlMessages::Receive() {
  if (receive_.data != nullptr && !receive_.done) return absl::OkStatus();
  absl::Status failure;
  if (receive_.done) {
    const size_t from = static_cast<size_t>(received_.rank);
    if (received_.kind == Kind::kQuestion) {
      SendBare(received_.rank, Kind::kAnswer);
    } else if (received_.kind == Kind::kAnswer) {
      answered_[from] = true;
    } else if (failure = received_.failure.Unpack(); failure.ok()) {
      departures_[from] = {true, received_.operations, received_.envelopes};
    }
  }
  received_ = Message();
  wire_.ReceiveFromAny(&receive_, WireTag::kControl, &received_, sizeof received_);
  return failure;
}

void ControlMessages::Ask() {
  if (std::exchange(asked_, true)) return;
  for (int r = 0; r < layout_.size(); ++r) {
    if (layout_.node_of(r) != layout_.node_of(rank_) && !departure(r).left) SendBare(r, Kind::kQuestion);
  }
}

void ControlMessages::SendBare(int to, Kind kind) {
  Message& message = sent_.emplace_back();
  message.rank = rank_;
  message.kind = kind;
  wire_.Send(&sends_, to, WireTag::kControl, &message, MessageBytes());
}

void ControlMessages::Send(const absl::Status& failure, uint64_t operations,
                           absl::FunctionRef<uint64_t(int)> envelopes_to) {
  for (int r = 0; r < layout_.size(); ++r) {
    if (r == rank_ || (!failure.ok() && layout_.node_of(r) == layout_.node_of(rank_))) continue;
    Message& message = sent_.emplace_back();
    message.rank = rank_;
    message.operations = operations;
    message.envelopes = envelopes_to(r);
    message.failure.Pack(failure);
    wire_.Send(&sends_, r, WireTag::kControl, &message, MessageBytes());
  }
}

void ControlMessages::Stop(bool drain) {
  const bool received = receive_.data != nullptr && (receive_.done || !wire_.Cancel(&receive_));
  const auto left = std::count_if(departures_.begin(), departures_.end(), [](const Departure& d) { return d.left; });
  const int others = layout_.size() - 1 - static_cast<int>(left);
  if (drain) wire_.Drain(WireTag::kControl, MessageBytes(), others - (received ? 1 : 0));
}

}  // namespace ddp
