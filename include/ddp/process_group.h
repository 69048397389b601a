// SPDX-License-Identifier: Apache-2.0
// Collective operations over a group of ranks.
#ifndef DDP_PROCESS_GROUP_H_
#define DDP_PROCESS_GROUP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "ddp/types.h"

namespace ddp {

namespace internal {
// The state of an operation, to which a Work refers. Backends derive from it; users never see it.
class DDP_EXPORT WorkState {
 public:
  virtual bool Done() const = 0;
  virtual absl::Status Wait(absl::Time deadline) = 0;
  virtual absl::Status BlockStream(Stream stream) = 0;
  virtual int64_t EndedNs() const { return 0; }
  virtual absl::Status CallStatus() const { return absl::OkStatus(); }
  virtual void Ref() = 0;
  virtual void Unref() = 0;

 protected:
  virtual ~WorkState() = default;
};
}  // namespace internal

// A handle to one asynchronous operation. Copies refer to the same operation. Destroying the last copy neither cancels
// the operation nor waits for it: the operation continues, and its buffers must stay valid until the group is idle. A
// default-constructed Work is an operation that has succeeded. If the call itself failed, Wait returns its error.
//
// Thread-safety: any thread may call any method, but only one thread at a time may use one copy. The group must outlive
// a Wait or a BlockStream that is under way. A Work may outlive the group.
class DDP_EXPORT Work {
 public:
  Work() = default;
  // A call that was refused: the Work is done, and Wait returns `error`. With OkStatus the same as Work().
  Work(absl::Status error);  // NOLINT(google-explicit-constructor)
  // For backends: takes ownership of one reference.
  explicit Work(internal::WorkState* adopted) : state_(adopted) {}
  // Another handle to the same operation.
  Work(const Work& other) : state_(other.state_) {
    if (state_ != nullptr) state_->Ref();
  }
  // Takes over the handle; `other` is then as if default-constructed.
  Work(Work&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  // From now on a handle to the other operation.
  Work& operator=(Work other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Work() {
    if (state_ != nullptr) state_->Unref();
  }

  // True once the result is in place or the operation has failed. Never blocks.
  bool Done() const { return state_ == nullptr || state_->Done(); }

  // Blocks until Done and returns the outcome. Meanwhile the calling thread does the group's work. If `deadline` passes
  // first, returns DeadlineExceeded, and the operation continues. (This differs from the operation's own time-out,
  // ProcessGroup::SetTimeout, which aborts the group.)
  absl::Status Wait(absl::Time deadline = absl::InfiniteFuture()) {
    return state_ == nullptr ? absl::OkStatus() : state_->Wait(deadline);
  }

  // The outcome of the call that returned this Work: an error if it was refused, so that nothing was started.
  absl::Status call_status() const { return state_ == nullptr ? absl::OkStatus() : state_->CallStatus(); }

  // When it ended, in nanoseconds on CLOCK_MONOTONIC: that may be earlier than anybody looked. Only once it is Done,
  // and only for reductions of a bucket (ReduceOptions::bucket) in CPU memory. 0: not known.
  int64_t ended_ns() const { return state_ == nullptr ? 0 : state_->EndedNs(); }

  // Orders all work submitted to `stream` from now on after this operation. Returns at once. On the CPU it waits
  // instead.
  absl::Status BlockStream(Stream stream) { return state_ == nullptr ? absl::OkStatus() : state_->BlockStream(stream); }

 private:
  internal::WorkState* state_ = nullptr;
};

// Memory that a group can reduce without copying it in or out. It owns the memory, which stays valid until the last
// copy of the Allocation is destroyed, even if the group is destroyed earlier. The memory is initially zero.
class DDP_EXPORT Allocation {
 public:
  Allocation() = default;
  // `bytes` bytes of `device` at `data`, which are freed with the last copy of `data`.
  Allocation(std::shared_ptr<void> data, size_t bytes, Device device, bool registered = false)
      : data_(std::move(data)), bytes_(bytes), device_(device), registered_(registered) {}

  void* data() const { return data_.get(); }                    // the first byte
  const std::shared_ptr<void>& owner() const { return data_; }  // keeps the memory alive
  size_t bytes() const { return bytes_; }                       // its size
  Device device() const { return device_; }                     // whose memory it is
  // Whether the group that allocated it has registered it with NCCL, whose small sums on it are faster.
  bool registered() const { return registered_; }

  // Returns the `count` elements of `dtype` that start at `offset_bytes`. The range must lie inside the memory.
  Buffer View(DType dtype, size_t offset_bytes, size_t count) const {
    return Buffer{static_cast<char*>(data_.get()) + offset_bytes, count, dtype, device_};
  }

 private:
  std::shared_ptr<void> data_;
  size_t bytes_ = 0;
  Device device_;
  bool registered_ = false;
};

// How a reduction combines the inputs of the ranks.
struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;  // the sum by default
  // result = postscale * reduce(prescale * input). Floating-point types only. kAvg multiplies postscale by 1 / size().
  double prescale = 1;   // of each input
  double postscale = 1;  // of the result
  // If set, 1 is stored there before the Work is done if the result, as stored in `out`, contains an infinity or a NaN.
  // Otherwise the word does not change. A float16 sum above 65504 counts, although the sum in float32 was finite. Equal
  // on all ranks for AllReduce. Floating-point types only.
  uint32_t* nonfinite = nullptr;
  // The bucket of gradients that the operation reduces. It identifies the operation in errors, in the flight recorder
  // and in the timeline. -1: none.
  int bucket = -1;
};

// The sum over all ranks.
inline ReduceOptions Sum() { return {.op = ReduceOp::kSum}; }
// The mean over all ranks.
inline ReduceOptions Avg() { return {.op = ReduceOp::kAvg}; }

// One operation, as the methods of ProcessGroup hand it to Start. What it refers to lives as long as the call.
struct Call {
  // Which operation it is.
  enum class Kind : uint8_t {
    kAllReduce,
    kReduceScatter,
    kAllGather,
    kAllGatherV,  // AllGather with counts
    kAllToAll,
    kReduceScatterV,  // ReduceScatter and AllToAll with counts
    kAllToAllV,
    kBroadcast,
    kReduce,
    kGather,
    kScatter,
    kBarrier,
    kSend,
    kRecv,
    kSendRecv
  };

  Kind kind = Kind::kBarrier;  // which operation
  Buffers in = {};             // what this rank gives
  Buffers out = {};            // what it gets; equal to `in` for kBroadcast, kSend and kRecv
  int peer = 0;                // kBroadcast, kReduce, kGather, kScatter: the root. kSend, kRecv: the other rank
  int from = 0;                // kSendRecv; `peer` is where to
  int tag = 0;                 // kSend, kRecv, kSendRecv
  absl::Span<const size_t> counts = {};      // kAllGatherV, kReduceScatterV; kAllToAllV: of `in`
  absl::Span<const size_t> out_counts = {};  // kAllToAllV
  ReduceOptions reduce = {};                 // kAllReduce, kReduceScatter, kReduceScatterV, kReduce
  Stream after = {};                         // the operation starts after this work
};

// Returns the ranks that caused an error of a group: those that have died or left, or did not arrive in time. Empty if
// no particular rank is to blame (Abort, FailedPrecondition). The same on all ranks. See Context::NewGroup.
DDP_EXPORT std::vector<int> FailedRanks(const absl::Status& error);

// A fixed set of ranks, 0 to size() - 1, that run collective operations together. Created by Context.
//
// Rules for every operation:
//   - All ranks make the same calls in the same order, with equal counts, dtypes and options. The operations of a group
//     take effect in the order of the calls.
//   - The call returns at once with a Work. Do not change inputs and do not read outputs until it is done.
//   - In place: `out` may overlap `in` only as each operation describes. Each element of `out` must then be the element
//     of `in` at the same position, with the same size. Any other overlap, also between `out` buffers, is
//     InvalidArgument.
//   - `after`: the operation starts when the work submitted to this stream so far has finished. Operations on GPU
//     memory need it (InvalidArgument without); kNoStream says that the host has waited for all such work. No meaning
//     for CPU memory.
//
// Arithmetic. 16-bit floats are accumulated in float32 and rounded once. The hierarchical backend adds contributions in
// rank order and scales the sum. With several nodes it adds the contributions of each node first, and then the nodes'
// sums in node order. So all ranks get the same bits, for every split into calls, every timing and every vector width.
//
// Errors come from Work::Wait. InvalidArgument: a mistake of the caller; nothing has happened, and the Work is done at
// once. The other errors also come from every later operation, because a failed group stays failed:
//   - DeadlineExceeded: the operation's time-out has passed. Names the operation and the ranks that did not arrive.
//   - Unavailable: a peer has died. Names it.
//   - FailedPrecondition: ranks disagree about the operation. Names both sides.
//   - Aborted: a rank called Abort or gave up, or destroyed the group with something pending. Contains the cause.
// The outputs of a failed operation are undefined. After the error no other rank writes to them: if a peer was stopped
// in the middle of a write and resumes later, it writes to other memory. (Ranks that are threads of one process share
// one memory; there the error is returned only when no peer is in the middle of a write.)
//
// Thread-safety: any thread may call any method. Concurrent operations of one group are serialised; the caller must
// ensure that their order is equal on all ranks. A group is destroyed (also by its Context) when no thread is in one of
// its methods or waits for one of its Works. To end such a wait, call Abort, and join the thread first.
//
//   auto buffer = group.Allocate(bytes, Device{});
//   ddp::Buffer x = buffer->View(DType::kFloat32, 0, n);
//   ddp::Work work = group.AllReduce(x, x, ddp::Avg());
//   absl::Status status = work.Wait();
class DDP_EXPORT ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;                   // this rank, 0 to size() - 1
  virtual int size() const = 0;                   // the number of ranks
  virtual absl::string_view backend() const = 0;  // "nccl", "hierarchical", "local"
  // The device whose memory is fast in this group. A group of a GPU also accepts CPU memory.
  virtual Device device() const { return Device{}; }

  // out[i] = the reduction of in[i] over all ranks. `in` and `out` have equal total counts. Their types may differ
  // among float32 and the 16-bit floats; in place, both types must have the same size.
  Work AllReduce(Buffers in, Buffers out, const ReduceOptions& options = {}, Stream after = {}) {
    return Start({.kind = Call::Kind::kAllReduce, .in = in, .out = out, .reduce = options, .after = after});
  }

  // Copies root's buffers to all ranks.
  Work Broadcast(Buffers buffers, int root, Stream after = {}) {
    return Start({.kind = Call::Kind::kBroadcast, .in = buffers, .out = buffers, .peer = root, .after = after});
  }

  // out = the inputs of all ranks, concatenated in rank order: count(out) = size() * count(in). In place: `in` is this
  // rank's part of `out`.
  Work AllGather(Buffers in, Buffers out, Stream after = {}) {
    return Start({.kind = Call::Kind::kAllGather, .in = in, .out = out, .after = after});
  }

  // The same with uneven inputs: rank r contributes counts[r] elements, which may be 0, and `out` has the sum of all
  // counts. `counts` has one entry per rank and is equal on all ranks. It may be destroyed after the call.
  Work AllGather(Buffers in, Buffers out, absl::Span<const size_t> counts, Stream after = {}) {
    return Start({.kind = Call::Kind::kAllGatherV, .in = in, .out = out, .counts = counts, .after = after});
  }

  // `in` and `out` consist of size() equal parts. Part r of `in` goes to rank r, and part r of `out` comes from rank r.
  // In place: `in` and `out` are the same.
  Work AllToAll(Buffers in, Buffers out, Stream after = {}) {
    return Start({.kind = Call::Kind::kAllToAll, .in = in, .out = out, .after = after});
  }

  // The same with uneven parts: in_counts[r] elements of `in` go to rank r, and out_counts[r] elements of `out` come
  // from it, as many as rank r's in_counts has for this rank. Parts may be empty; they lie in rank order without gaps.
  // `in` and `out` do not overlap. The counts may be destroyed after the call. On CPU memory see Reduce.
  Work AllToAll(Buffers in, absl::Span<const size_t> in_counts, Buffers out, absl::Span<const size_t> out_counts,
                Stream after = {}) {
    return Start({.kind = Call::Kind::kAllToAllV,
                  .in = in,
                  .out = out,
                  .counts = in_counts,
                  .out_counts = out_counts,
                  .after = after});
  }

  // out = this rank's part of the reduction of `in`: count(in) = size() * count(out). In place: `out` is this rank's
  // part of `in`.
  Work ReduceScatter(Buffers in, Buffers out, const ReduceOptions& options = {}, Stream after = {}) {
    return Start({.kind = Call::Kind::kReduceScatter, .in = in, .out = out, .reduce = options, .after = after});
  }

  // The same with uneven parts: rank r gets counts[r] elements, which may be 0, and `in` has the sum of all counts.
  // `counts` has one entry per rank and is equal on all ranks. It may be destroyed after the call. It is made of a
  // Reduce to each rank.
  Work ReduceScatter(Buffers in, Buffers out, absl::Span<const size_t> counts, const ReduceOptions& options = {},
                     Stream after = {}) {
    return Start({.kind = Call::Kind::kReduceScatterV,
                  .in = in,
                  .out = out,
                  .counts = counts,
                  .reduce = options,
                  .after = after});
  }

  // Like AllReduce, but only `root` gets the result, in `out`. The other ranks may pass an empty `out`. If they pass
  // one, only its dtype is used; if not, the dtype of `in` is used instead. Of the words for what is not finite, only
  // the root's can change.
  //
  // On CPU memory these operations are made of others: Reduce of an AllReduce; Gather, Scatter and AllToAll with counts
  // of messages, which are not ordered with other operations. Wait for what writes their input.
  Work Reduce(Buffers in, Buffers out, int root, const ReduceOptions& options = {}, Stream after = {}) {
    return Start({.kind = Call::Kind::kReduce, .in = in, .out = out, .peer = root, .reduce = options, .after = after});
  }

  // Concatenates the inputs of all ranks in rank order into `out` of `root`: count(out) = size() * count(in). The other
  // ranks' `out` is ignored. In place: root's `in` is its own part of `out`.
  Work Gather(Buffers in, Buffers out, int root, Stream after = {}) {
    return Start({.kind = Call::Kind::kGather, .in = in, .out = out, .peer = root, .after = after});
  }

  // The reverse of Gather: root's `in` consists of size() equal parts, and part r goes to `out` of rank r. The other
  // ranks' `in` is ignored. In place: root's `out` is its own part of `in`.
  Work Scatter(Buffers in, Buffers out, int root, Stream after = {}) {
    return Start({.kind = Call::Kind::kScatter, .in = in, .out = out, .peer = root, .after = after});
  }

  // Sends a message to one rank, which receives it with the same tag, dtype and count.
  //   - Messages between two ranks with the same tag arrive in the order in which they were sent. Messages with
  //     different tags may be received in any order.
  //   - Neither call waits for collective operations. The Work of Send is done when its buffers may be used again. For
  //     a small message this is at once. A large message waits for its Recv; but if the receiver waits for another
  //     operation meanwhile, the library moves the message to its own memory.
  //   - Tags are 0 to 2^30 - 1. Higher ones are reserved for the library's own messages.
  //
  // On a GPU: messages run in the order of the calls, on the same stream as collective operations, and tags
  // are not compared. If two ranks send to each other, one of them must receive first, or both call SendRecv.
  //
  // Errors name both ranks, the tag and the bytes: FailedPrecondition if dtypes or counts differ (the sender of a small
  // message gets it from its next call), DeadlineExceeded if no message with the tag arrives, or if it is not received.
  Work Send(Buffers buffers, int to, int tag, Stream after = {}) {
    return Start({.kind = Call::Kind::kSend, .in = buffers, .out = buffers, .peer = to, .tag = tag, .after = after});
  }
  // Receives a message that rank `from` sends to this rank: see Send.
  Work Recv(Buffers buffers, int from, int tag, Stream after = {}) {
    return Start({.kind = Call::Kind::kRecv, .in = buffers, .out = buffers, .peer = from, .tag = tag, .after = after});
  }

  // Sends `in` to rank `to` and receives `out` from rank `from`, both with this tag, in one call. So ranks that
  // exchange messages, in a ring for example, need no order among them, on GPUs either. `in` and `out` do not overlap.
  Work SendRecv(Buffers in, int to, Buffers out, int from, int tag, Stream after = {}) {
    return Start(
        {.kind = Call::Kind::kSendRecv, .in = in, .out = out, .peer = to, .from = from, .tag = tag, .after = after});
  }

  // The Work is done when all ranks have called Barrier and all their earlier collective operations are done.
  Work Barrier() { return Start({.kind = Call::Kind::kBarrier}); }

  // All methods above call Start. A group that forwards to another one, to record or to change its calls, overrides it.
  virtual Work Start(const Call& call) = 0;

  // Allocates `bytes` bytes (> 0) of zeroed, page-aligned memory on every rank. Collective: all ranks request the same
  // sizes in the same order. ResourceExhausted, on every rank, if there is not enough memory.
  virtual absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) = 0;

  // Creates one group for each `color`, of the ranks that pass it. They are ordered by `key`, and for equal keys by
  // their rank in this group. A rank with a negative color gets no group (a null pointer). Collective; blocks. The
  // groups are independent: they do not wait for each other's operations, and a failure or Abort of one does not fail
  // the other. Only the death of a rank fails all groups that contain it. The new group may outlive this group, but not
  // the Context.
  virtual absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) = 0;

  // Transfers memory that another group has allocated to this group, which then reduces it in place. Addresses and
  // contents do not change. It is for ranks that continue in a smaller group; DistributedDataParallel::Rebind calls it.
  // If the earlier group still works, it copies this memory in and out from now on.
  //
  // Collective: all ranks pass memory of the same size, in the same order. During the call no group may run an
  // operation on the memory, and no thread may access it. Errors: ResourceExhausted, on every rank, if there is not
  // enough memory (the contents are kept); FailedPrecondition if sizes differ; InvalidArgument for CPU memory that is
  // not from Allocate.
  //
  // GPU memory may be the program's own, in an Allocation that the program makes: gradients in it are reduced in place,
  // but NCCL does not get it registered, so that small reductions take longer than on memory from Allocate. The group
  // knows it as long as an owner of the Allocation lives.
  virtual absl::Status Register(const Allocation& memory) = 0;

  // Sets the time-out of the operations that begin from now on, in this group and in those that Split makes of it
  // later. Pending operations keep theirs. Initially ContextOptions::timeout. Any thread may call it. It is a setting
  // of this rank: call it on all ranks alike, because the rank that gives up first fails the group for all.
  // InvalidArgument if it is not above 0.
  virtual absl::Status SetTimeout(absl::Duration timeout) = 0;
  virtual absl::Duration timeout() const = 0;  // of the operations that begin now

  // Fails the group on all ranks: every unfinished Work, on this rank and on its peers, ends with Aborted and the text
  // of `why`. Any thread may call it at any time. Only the first cause counts.
  virtual void Abort(absl::Status why) = 0;

  // Returns OK, or the first cause of the group's failure.
  virtual absl::Status status() const = 0;

  // On a GPU: a word that kernels can read. It is 0 until the group fails. It changes before any stream that waits for
  // an operation of the group is released, so that later kernels on the stream can detect that their input is invalid.
  // It lives as long as the group, in host memory: a GPU reads such a word for one thread block after another, about a
  // microsecond each, so have one thread copy it into the GPU's memory for kernels of many. Null on the CPU.
  virtual const uint32_t* failed_word() const { return nullptr; }

  // Does the part of the group's pending operations that is possible without waiting. Call it from time to time during
  // a long computation, so that peers do not wait for this rank. Cheap if nothing is pending.
  virtual void Progress() = 0;
};

}  // namespace ddp

#endif  // DDP_PROCESS_GROUP_H_
