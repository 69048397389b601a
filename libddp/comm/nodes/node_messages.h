// Messages between two ranks of a group of several nodes, over its wire.
//
// The sender copies the data and sends an envelope, then the data. The receiver keeps room for one envelope of
// whomever; when it comes, memory is made for the data, and when they are there they go to the Recv that asks for them,
// sooner or later. Of all but a small message the receiver then tells the sender, which is done only now: so what is
// under way between two ranks is bounded by what the sender waits for.
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
#include "libddp/comm/base/counted_work.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/launch/wire.h"

namespace ddp {

class NodePipeline;

// What the caller of Send or Recv asks for.
struct NodeMessageSpec {
  int peer, tag;
  DType dtype;
  size_t count;
  RangeList data;

  size_t bytes() const { return count * SizeOf(dtype); }
};

// One Send or Recv that was not done at once.
class NodeMessage final : public CountedWork, public NodeMessageSpec {
 public:
  NodeMessage(NodePipeline* pipeline, bool send, NodeMessageSpec spec)
      : NodeMessageSpec(std::move(spec)), pipeline_(pipeline), is_send_(send) {}

  absl::Status Wait(absl::Time deadline) override;
  // Finish, and gives up the reference of NodeMessages.
  void End(absl::Status status) {
    Finish(std::move(status));
    Unref();
  }
  std::string Describe() const;  // "send(to rank 1, tag 3, float32, 100 elements, 400 bytes)"

  bool is_send() const { return is_send_; }
  uint64_t posted = 0;     // in the order of the calls
  int64_t noticed_ns = 0;  // when it was first seen to be the oldest of its peer and direction

 private:
  ~NodeMessage() override = default;

  NodePipeline* const pipeline_;
  const bool is_send_;
};

// All is called with the pipeline's drive mutex held.
class NodeMessages {
 public:
  explicit NodeMessages(NodePipeline* pipeline, int ranks);

  absl::StatusOr<Work> Send(NodeMessageSpec spec);
  Work Recv(NodeMessageSpec spec);

  // Does what can be done without waiting; returns whether anything was.
  bool Advance();
  // Whether a Send or Recv is not done.
  bool Pending() const { return pending_ > 0; }
  // Whether all that was sent has left.
  bool AllLeft() const;
  // DeadlineExceeded or Unavailable if a message will not be done any more. `gone`: by rank, whether it has left,
  // having sent so many envelopes to this one.
  struct Gone {
    bool gone = false;
    uint64_t envelopes = 0;
  };
  absl::Status Look(int64_t now, int64_t timeout_ns, const std::vector<Gone>& gone);
  uint64_t envelopes_to(int rank) const { return sent_[static_cast<size_t>(rank)]; }
  // Ends what is not done. What the wire may work on stays.
  void End(const absl::Status& why);
  // No more envelopes.
  void StopListening();

 private:
  struct Envelope {
    int32_t tag = 0;
    DType dtype{};
    bool reply = false;
    uint64_t count = 0;
    uint64_t number = 0;
    size_t bytes() const { return count * SizeOf(dtype); }
  };
  struct Parcel {
    int peer = 0;
    Envelope envelope;
    std::unique_ptr<char[]> data;
    std::deque<Transfer> transfers;
    NodeMessage* owner = nullptr;
    bool arrived = false;  // an incoming one: here; an outgoing one: there
  };
  using ParcelPtr = std::unique_ptr<Parcel>;

  void Listen();
  void Hear();
  void Post(Parcel* parcel, bool send);
  void SendEnvelope(Parcel* parcel);
  void Match(Parcel* parcel, NodeMessage* receiver);
  NodeMessage* Make(bool send, NodeMessageSpec spec);
  absl::Status TimedOut(const NodeMessage& message) const;
  std::vector<NodeMessage*> Unfinished() const;

  NodePipeline& pipeline_;
  Transfer listening_;
  Envelope heard_;
  std::deque<ParcelPtr> outgoing_, incoming_;
  std::vector<NodeMessage*> expected_;       // receives without a message, in order
  std::vector<uint64_t> sent_, heard_from_;  // envelopes, by rank
  uint64_t next_number_ = 0, next_posted_ = 0;
  int pending_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_NODE_MESSAGES_H_
