// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks of a group of several nodes, over its wire.
//
// The sender copies the data and sends an envelope, then the data. The receiver keeps one any-source receive posted for
// envelopes. When one comes, it allocates memory for the data, which go to the matching Recv as soon as there is one.
// It then replies to the sender, except for small messages: a Send is done when the reply has come, so a sender that
// waits for its messages bounds the memory that they take.
#ifndef LIBDDP_COMM_NODES_NODE_MESSAGES_H_
#define LIBDDP_COMM_NODES_NODE_MESSAGES_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/nodes/control_messages.h"
#include "libddp/comm/nodes/node_wire.h"
#include "libddp/comm/nodes/node_work.h"

namespace ddp {

// What the caller of Send or Recv asks for.
struct NodeMessageSpec {
  int peer, tag;
  DType dtype;
  size_t count;
  absl::Duration timeout;
  RangeList data;

  size_t bytes() const { return count * SizeOf(dtype); }
};

// One Send or Recv that was not done at once.
class NodeMessage final : public NodeWork, public NodeMessageSpec {
 public:
  NodeMessage(NodePipeline* pipeline, bool send, NodeMessageSpec spec)
      : NodeWork(pipeline), NodeMessageSpec(std::move(spec)), is_send_(send) {}

  // Finish, and gives up the reference of NodeMessages.
  void End(absl::Status status) {
    Finish(std::move(status));
    Unref();
  }
  std::string Describe() const override;  // "send(to rank 1, tag 3, float32, 100 elements, 400 bytes)"

  bool is_send() const { return is_send_; }
  uint64_t posted = 0;  // in the order of the calls

 private:
  ~NodeMessage() override = default;

  const bool is_send_;
};

// Not thread-safe: the pipeline's mutex is held.
class NodeMessages {
 public:
  // `pipeline` drives them. It outlives this, as does the wire.
  NodeMessages(NodePipeline* pipeline, NodeWire* wire, int rank, int ranks);

  Work Send(NodeMessageSpec spec);
  Work Recv(NodeMessageSpec spec);

  // Does what can be done without waiting; returns whether anything was.
  bool Advance();
  // Whether a Send or Recv is not done.
  bool Pending() const { return pending_ > 0; }
  // Whether all that was sent has left.
  bool AllLeft() const;
  // Why the group has to fail: two ranks disagree about a message, or there is no memory for one.
  const absl::Status& status() const { return status_; }
  // DeadlineExceeded or Unavailable if a message cannot be done any more.
  absl::Status CheckHealth(int64_t now, const ControlMessages& control);
  uint64_t envelopes_to(int rank) const { return sent_[static_cast<size_t>(rank)]; }
  // Ends what is not done. What the wire may work on stays.
  void End(const absl::Status& why);
  // Receives no more envelopes.
  void Stop();

 private:
  struct Envelope {
    int32_t tag = 0;
    DType dtype{};
    bool reply = false;
    uint64_t count = 0;
    uint64_t number = 0;
    size_t bytes() const { return count * SizeOf(dtype); }
  };
  // A message under way.
  struct Parcel {
    int peer = 0;
    Envelope envelope;
    std::unique_ptr<char[]> data;
    std::deque<Transfer> transfers;
    NodeMessage* owner = nullptr;
    bool arrived = false;  // an incoming one: here; an outgoing one: there
  };
  using ParcelPtr = std::unique_ptr<Parcel>;

  void TakeEnvelope();
  void Post(Parcel* parcel, bool send);
  void SendEnvelope(Parcel* parcel);
  void Match(Parcel* parcel, NodeMessage* receiver);
  NodeMessage* Make(bool send, NodeMessageSpec spec);
  absl::Status TimedOut(const NodeMessage& message) const;
  std::vector<NodeMessage*> Unfinished() const;

  NodePipeline* const pipeline_;
  NodeWire& wire_;
  const int rank_, ranks_;
  absl::Status status_;
  Transfer receive_;
  Envelope received_;
  std::deque<ParcelPtr> outgoing_, incoming_;
  std::vector<NodeMessage*> expected_;          // receives without a message, in order
  std::vector<uint64_t> sent_, received_from_;  // envelopes, by rank
  uint64_t next_number_ = 0, next_posted_ = 0;
  int pending_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_NODE_MESSAGES_H_
