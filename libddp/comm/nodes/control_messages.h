// SPDX-License-Identifier: Apache-2.0
// What the ranks of a group of several nodes tell each other besides data: that one fails, or leaves in good order, or
// is still there.
#ifndef LIBDDP_COMM_NODES_CONTROL_MESSAGES_H_
#define LIBDDP_COMM_NODES_CONTROL_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/nodes/node_wire.h"

namespace ddp {

// Not thread-safe.
class ControlMessages {
 public:
  // What a rank had done when it left.
  struct Departure {
    bool left = false;
    uint64_t operations = 0;  // finished
    uint64_t envelopes = 0;   // sent to this rank
  };

  // The layout and the wire outlive this.
  ControlMessages(NodeWire* wire, const NodeLayout& layout, int rank)
      : wire_(*wire),
        layout_(layout),
        rank_(rank),
        departures_(static_cast<size_t>(layout.size())),
        answered_(static_cast<size_t>(layout.size())) {}

  // Reads what has come, answers who asks, and keeps one receive posted for all ranks. Returns the error of a rank that
  // reports one.
  absl::Status Receive();
  const Departure& departure(int rank) const { return departures_[static_cast<size_t>(rank)]; }

  // Asks the ranks of other nodes that have not left, once, whether they are there.
  void Ask();
  bool answered(int rank) const { return answered_[static_cast<size_t>(rank)]; }

  // Sends `failure` to all ranks of other nodes or, if it is OK, to all ranks that this one leaves.
  void Send(const absl::Status& failure, uint64_t operations, absl::FunctionRef<uint64_t(int)> envelopes_to);
  bool AllSent() const { return AllDone(sends_); }
  // Receives no more. `drain`: all others will leave, too; their messages would stay in MPI's memory.
  void Stop(bool drain);

 private:
  enum class Kind : int32_t { kEnd, kQuestion, kAnswer };
  struct Message {
    int32_t rank = 0;
    Kind kind = Kind::kEnd;
    uint64_t operations = 0;
    uint64_t envelopes = 0;
    PackedError failure;  // only as much of it travels as a group of this size needs
  };
  size_t MessageBytes() const { return offsetof(Message, failure) + PackedError::Bytes(layout_.size()); }

  void SendBare(int to, Kind kind);

  NodeWire& wire_;
  const NodeLayout& layout_;
  const int rank_;
  std::vector<Departure> departures_;  // by rank
  std::vector<bool> answered_;         // the same
  bool asked_ = false;
  Transfer receive_;
  Message received_;
  std::deque<Message> sent_;
  std::deque<Transfer> sends_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_CONTROL_MESSAGES_H_
