// SPDX-License-Identifier: Apache-2.0
// The messages of one group of several nodes.
#ifndef LIBDDP_COMM_NODES_NODE_WIRE_H_
#define LIBDDP_COMM_NODES_NODE_WIRE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "libddp/launch/wire.h"

namespace ddp {

// The kinds of messages, which do not meet.
enum class WireTag { kHeader, kPartial, kResult, kControl, kEnvelope, kPayload };

// A wire that knows what it calls each rank of the group, and keeps its first error. Groups that are split off get
// channels of the same wire.
class NodeWire {
 public:
  // For the group of all `ranks` that the wire connects.
  NodeWire(std::unique_ptr<Wire> wire, int ranks)
      : wire_(std::move(wire)),
        names_(static_cast<size_t>(ranks)),
        next_channel_(std::make_shared<std::atomic<uint32_t>>(1)) {
    std::iota(names_.begin(), names_.end(), 0);
  }

  // The lowest channel that this process has not used. A channel has the same number on all ranks that use it.
  uint32_t next_channel() const { return *next_channel_; }
  uint32_t channels() const { return wire_->channels(); }
  void SkipChannel(uint32_t channel) { *next_channel_ = channel + 1; }
  // For a group of some of these ranks.
  std::unique_ptr<NodeWire> Channel(uint32_t channel, const std::vector<int>& ranks) const {
    std::vector<int> names;
    names.reserve(ranks.size());
    for (const int r : ranks) names.push_back(names_[static_cast<size_t>(r)]);
    return std::unique_ptr<NodeWire>(new NodeWire(wire_->Channel(channel), std::move(names), next_channel_));
  }

  // Starts a message to or from a rank of the group. It stays in `list`, where it is not done if there was an error.
  void Send(std::deque<Transfer>* list, int to, WireTag tag, const void* data, size_t bytes) {
    Transfer& transfer = list->emplace_back(Make(names_[static_cast<size_t>(to)], tag, const_cast<void*>(data), bytes));
    status_.Update(wire_->Send(&transfer));
  }
  void Receive(std::deque<Transfer>* list, int from, WireTag tag, void* data, size_t bytes) {
    Transfer& transfer = list->emplace_back(Make(names_[static_cast<size_t>(from)], tag, data, bytes));
    status_.Update(wire_->Receive(&transfer));
  }
  void ReceiveFromAny(Transfer* transfer, WireTag tag, void* data, size_t bytes) {
    *transfer = Make(Transfer::kAnyPeer, tag, data, bytes);
    status_.Update(wire_->Receive(transfer));
  }
  void Poll() { status_.Update(wire_->Poll()); }
  // The rank at the other end of a transfer.
  int PeerOf(const Transfer& transfer) const {
    return static_cast<int>(std::find(names_.begin(), names_.end(), transfer.peer) - names_.begin());
  }
  // The first error of any of these.
  const absl::Status& status() const { return status_; }

  // As for Wire.
  bool Usable(bool background) const { return wire_->Usable(background); }
  bool Cancel(Transfer* transfer) { return wire_->Cancel(transfer); }
  bool Abandon() { return wire_->Abandon(); }
  void Drain(WireTag tag, size_t bytes, int count) { wire_->Drain(static_cast<int>(tag), bytes, count); }

 private:
  NodeWire(std::unique_ptr<Wire> wire, std::vector<int> names, std::shared_ptr<std::atomic<uint32_t>> next_channel)
      : wire_(std::move(wire)), names_(std::move(names)), next_channel_(std::move(next_channel)) {}

  static Transfer Make(int peer, WireTag tag, void* data, size_t bytes) {
    return {.peer = peer, .tag = static_cast<int>(tag), .data = data, .bytes = bytes};
  }

  const std::unique_ptr<Wire> wire_;
  std::vector<int> names_;  // by rank
  const std::shared_ptr<std::atomic<uint32_t>> next_channel_;
  absl::Status status_;
};

// Whether all have been sent, or received.
inline bool AllDone(const std::deque<Transfer>& transfers) {
  return std::all_of(transfers.begin(), transfers.end(), [](const Transfer& t) { return t.done && !t.truncated; });
}

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_NODE_WIRE_H_
