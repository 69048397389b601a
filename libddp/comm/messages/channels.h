// Messages between two ranks of a hierarchical group.
//
// The sender writes an envelope into the channel of the pair. A small message goes along, and is sent. Of a larger
// one the envelope says where the data lie: the receiver, once it knows where they shall go, copies them from there
// (out of shared memory, or by process_vm_readv out of the sender's process) and replies that it has. Where neither can
// be, it asks for them, and the sender puts them, chunk by chunk, into its pipe, while the receiver takes them out.
//
// The receiver empties channels in order, so that a message nobody has asked for yet holds up no other: it becomes a
// parcel, which waits. After a while its data are fetched too, and the sender may go on.
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
  RangeList data;
  bool along = false;  // the data go with the envelope
};

// One Send or Recv that was not done at once. The mutex of its Channels guards everything but the atomics.
class Message final : public CountedWork, public MessageSpec {
 public:
  Message(Channels* channels, MessageSpec spec) : MessageSpec(std::move(spec)), channels_(channels) {}

  absl::Status Wait(absl::Time deadline) override;
  std::string Describe() const;  // "send(to rank 1, tag 3, float32, 100 elements, 400 bytes)"

  uint64_t number = 0;     // kSend: in its channel
  uint64_t fed = 0;        // kSend: chunks put into the pipe
  bool busy = false;       // a thread reads or writes `data` without the mutex
  uint64_t posted = 0;     // in the order of the calls
  int64_t noticed_ns = 0;  // when it was first seen to be the oldest of its peer and direction
  bool is_send() const { return kind == Kind::kSend; }

 private:
  ~Message() override = default;

  Channels* const channels_;
};

// Thread-safe.
class Channels final : public Driver {
 public:
  // `engine`, of the same group, outlives this.
  Channels(ChannelBlock block, Engine* engine, ProgressThread* progress);
  // What is unfinished ends with Aborted.
  ~Channels() override;

  absl::StatusOr<Work> Send(MessageSpec spec);
  absl::StatusOr<Work> Recv(MessageSpec spec);

 private:
  // A message that has come, and whose data are on their way or not asked for.
  struct Parcel {
    int from = 0;
    int tag = 0;
    DType dtype{};
    size_t count = 0;
    uint64_t number = 0;
    Envelope::Contents contents{};
    std::vector<ListedRange> ranges;  // where the data lie
    Message* receiver = nullptr;      // who has asked for it; owns a reference
    std::unique_ptr<char[]> data;     // of a message that nobody had asked for
    bool in_hand = false;             // the data are here
    bool fetching = false;            // it is in `fetching_`
    bool asked = false;               // for the pipe
    bool busy = false;                // a thread fetches it without the mutex
    uint64_t got = 0;                 // chunks taken out of the pipe
    int64_t noticed_ns = 0;

    size_t bytes() const { return count * SizeOf(dtype); }
  };
  using ParcelPtr = std::shared_ptr<Parcel>;

  // This rank's ends of the two channels to a peer.
  struct Peer {
    uint64_t sent = 0, taken = 0;  // envelopes written, and known to be free again
    size_t ring_end = 0;           // where the next data begin, see ChannelBlock::Place
    SharedWriter writer;
    std::deque<Message*> unsent;       // for want of an envelope
    std::vector<Message*> sent_large;  // not yet replied to
    uint64_t replies_seen = 0;
    uint64_t received = 0;                    // envelopes read
    std::deque<Message*> expected;            // receives without a message
    std::deque<ParcelPtr> unexpected;         // messages without a receive
    std::deque<uint64_t> replies;             // not yet given, for want of a place
    uint64_t replied = 0, replies_taken = 0;  // given, and known to have been read
    bool no_reading = false;                  // process_vm_readv is not permitted
  };

  // Called with the mutex held. Those given the lock may release it for a while.
  bool Poll(Lock& lock, const Pass& pass) override;
  void CheckHealth(Lock& lock, bool background) override;
  bool InExchange() const override { return !feeding_.empty() || !fetching_.empty(); }
  bool GoAlong(const RangeList& data) const;
  bool WriteEnvelope(const MessageSpec& message);
  bool SendWaiting(int to);
  bool Drain(int from);
  ParcelPtr Open(int from, Envelope& envelope);
  bool Agrees(int from, size_t count, DType dtype, Message* receiver);
  void Deliver(const ParcelPtr& parcel, Message* receiver);
  void Want(const ParcelPtr& parcel);
  bool FetchAll(Lock& lock);
  bool Fetch(Lock& lock, const ParcelPtr& parcel);
  bool FetchFromPipe(const ParcelPtr& parcel);
  absl::Status Copy(const Parcel& parcel, const RangeList& to);
  static RangeList Target(const Parcel& parcel);
  void AskForPipe(const ParcelPtr& parcel);
  void Fetched(const ParcelPtr& parcel);
  void Forget(const ParcelPtr& parcel);
  void Answer(const Parcel& parcel, uint64_t kind);
  bool GiveReplies(int from);
  bool TakeReplies(int to);
  bool Feed();
  void Finish(Message* message, absl::Status status);
  void FailLocked(const absl::Status& why);
  bool FailedElsewhere();
  void RelieveSenders(int64_t now);
  void CheckPeers(int64_t waited_ns);
  absl::Status TimedOut(const Message& message) const;
  std::vector<Message*> Pending() const;  // messages that are not done, and that no thread is at
  Peer& peer(int r) { return peers_[static_cast<size_t>(r)]; }

  const ChannelBlock block_;
  Engine& engine_;
  const ControlBlock& control_;
  const AllocationTable& allocations_;
  const int rank_, size_;

  const OwnerProcess owner_;
  std::vector<Peer> peers_;
  std::vector<ParcelPtr> fetching_;
  std::deque<Message*> feeding_;  // the first one has the pipe
  SharedWriter pipe_writer_;
  absl::Status failure_;
  uint64_t next_posted_ = 0;  // `pending_`: messages not done, parcels being fetched, replies not yet given
  int64_t next_look_ns_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MESSAGES_CHANNELS_H_
