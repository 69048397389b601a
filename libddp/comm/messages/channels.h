// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks of a host.
//
// The sender writes an envelope into the channel of the pair. Small messages are eager: their data is in the envelope,
// and Send completes at once. For a larger one the envelope says where the data lies. Once the receiver knows where it
// belongs, it copies it from there (out of shared memory, or with process_vm_readv out of the sender's process) and
// replies. Where it can do neither, it requests the data, and the sender puts it chunk by chunk into its bounce ring.
//
// The receiver empties channels in order, so a message that has no Recv yet holds up no other. After a while the
// library fetches its data too, and the sender can go on.
#ifndef LIBDDP_COMM_MESSAGES_CHANNELS_H_
#define LIBDDP_COMM_MESSAGES_CHANNELS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/counted_work.h"
#include "libddp/comm/base/driver.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/memory/shared_writer.h"
#include "libddp/comm/messages/channel_block.h"

namespace ddp {

class Channels;

// What the caller of Send or Recv asks for.
struct MessageSpec {
  enum class Kind { kSend, kRecv } kind;
  int peer, tag;
  DType dtype;
  size_t count;
  absl::Duration timeout;
  RangeList data;
  bool eager = false;  // the data is in the envelope
};

// One Send or Recv that was not done at once. The mutex of its Channels guards everything but the atomics.
class Message final : public CountedWork, public MessageSpec {
 public:
  Message(Channels* channels, MessageSpec spec) : MessageSpec(std::move(spec)), channels_(channels) {}

  absl::Status Wait(absl::Time deadline) override;
  std::string Describe() const;  // "send(to rank 1, tag 3, float32, 100 elements, 400 bytes)"

  uint64_t number = 0;       // kSend: in its channel
  uint64_t chunks_sent = 0;  // kSend: chunks put into the bounce ring
  bool busy = false;         // a thread reads or writes `data` without the mutex
  uint64_t posted = 0;       // in the order of the calls
  int64_t noticed_ns = 0;    // when it was first seen to be the oldest of its peer and direction
  bool is_send() const { return kind == Kind::kSend; }

 private:
  ~Message() override = default;

  Channels* const channels_;
};

// Thread-safe. `pending_` counts messages that are not done, fetches, and replies that are not yet written.
class Channels final : public Driver {
 public:
  // `engine`, of the same group, outlives this.
  Channels(ChannelBlock block, Engine* engine, ProgressThread* progress);
  // What is unfinished ends with Aborted, and fails the group at the peers.
  ~Channels() override;

  Work Send(MessageSpec spec);
  Work Recv(MessageSpec spec);

 private:
  // A message that has come, but whose data has not reached a receiver.
  struct Incoming {
    int from = 0;
    int tag = 0;
    DType dtype{};
    size_t count = 0;
    uint64_t number = 0;
    Envelope::Contents contents{};
    std::vector<ListedRange> ranges;  // where the data lies
    Message* receiver = nullptr;      // null: there is no Recv yet. Owns a reference
    std::unique_ptr<char[]> data;     // of a message that was fetched before there was a Recv
    enum class State {
      kWaiting,   // for a receiver
      kReading,   // in `fetching_`, to be copied or read
      kBouncing,  // in `fetching_`, requested from the sender
      kComplete,  // `data` holds it, or the receiver's memory does
    } state = State::kWaiting;
    bool busy = false;             // a thread fetches it without the mutex
    uint64_t chunks_received = 0;  // chunks taken out of the bounce ring
    int64_t noticed_ns = 0;

    size_t bytes() const { return count * SizeOf(dtype); }
  };
  using IncomingPtr = std::shared_ptr<Incoming>;

  // This rank's ends of the two channels to a peer.
  struct Peer {
    uint64_t sent = 0, taken = 0;  // envelopes written, and known to be free again
    size_t ring_end = 0;           // where the next data begins, see ChannelBlock::Place
    SharedWriter writer;
    std::deque<Message*> unsent;       // no envelope was free
    std::vector<Message*> sent_large;  // not yet replied to
    uint64_t replies_seen = 0;
    uint64_t received = 0;                    // envelopes read
    std::deque<Message*> expected;            // receives without a message
    std::deque<IncomingPtr> unexpected;       // messages without a receive
    std::deque<uint64_t> replies;             // not yet written: the ring was full
    uint64_t replied = 0, replies_taken = 0;  // written, and known to have been read
    bool cannot_read = false;                 // process_vm_readv is not permitted
  };

  // Called with the mutex held. Those given the lock may release it for a while.
  bool Poll(Lock& lock, const Pass& pass) override;
  void CheckHealth(int64_t now, bool background) override;
  bool InExchange() const override { return !requested_.empty() || !fetching_.empty(); }
  bool IsEager(const RangeList& data) const;
  bool WriteEnvelope(const MessageSpec& message);
  bool SendWaiting(int to);
  bool ReadEnvelopes(int from);
  IncomingPtr ReadEnvelope(int from, Envelope& envelope);
  bool Agrees(int from, size_t count, DType dtype, Message* receiver);
  void Deliver(const IncomingPtr& incoming, Message* receiver);
  void StartFetch(const IncomingPtr& incoming);
  bool FetchAll(Lock& lock);
  bool Fetch(Lock& lock, const IncomingPtr& incoming);
  bool FetchFromRing(const IncomingPtr& incoming);
  absl::Status Copy(const Incoming& incoming, const RangeList& to);
  static RangeList Target(const Incoming& incoming);
  void RequestData(const IncomingPtr& incoming);
  void EndFetch(const IncomingPtr& incoming);
  void StopFetch(const IncomingPtr& incoming);
  void QueueReply(const Incoming& incoming, uint64_t kind);
  bool WriteReplies(int from);
  bool ReadReplies(int to);
  bool FillRing();
  void Finish(Message* message, absl::Status status);
  void FailLocked(const absl::Status& why);
  bool FailedElsewhere();
  void RelieveSenders(int64_t now);
  void CheckPeers(int64_t waited_ns);
  absl::Status TimedOut(const Message& message) const;
  std::vector<Message*> Pending() const;  // not done, and no thread works on them
  Peer& peer(int r) { return peers_[static_cast<size_t>(r)]; }

  const ChannelBlock block_;
  Engine& engine_;
  const ControlBlock& control_;
  const AllocationTable& allocations_;
  const int rank_, size_;

  const OwnerProcess owner_;
  std::vector<Peer> peers_;
  std::vector<IncomingPtr> fetching_;
  std::deque<Message*> requested_;  // by receivers; the first one uses the bounce ring
  SharedWriter bounce_writer_;
  absl::Status failure_;
  uint64_t next_posted_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MESSAGES_CHANNELS_H_
