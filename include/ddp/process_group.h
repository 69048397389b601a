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
#include "ddp/observer.h"
#include "ddp/types.h"

namespace ddp {

namespace internal {
// What a Work refers to. Backends derive from it; users never see it.
class DDP_EXPORT WorkState {
 public:
  virtual bool Done() const = 0;
  virtual absl::Status Wait(absl::Time deadline) = 0;
  virtual absl::Status BlockStream(Stream stream) = 0;
  virtual void Ref() = 0;
  virtual void Unref() = 0;

 protected:
  virtual ~WorkState() = default;
};
}  // namespace internal

// A handle to one asynchronous operation. Copies refer to the same operation. Dropping the last one neither cancels nor
// waits: the operation goes on, and its buffers must stay valid until the group is idle. A default-made Work is an
// operation that has succeeded.
//
// Thread-safe: any thread may call any method; each copy is used by one thread at a time.
class DDP_EXPORT Work {
 public:
  Work() = default;
  explicit Work(internal::WorkState* adopted) : state_(adopted) {}  // takes over one reference
  Work(const Work& other) : state_(other.state_) {
    if (state_ != nullptr) state_->Ref();
  }
  Work(Work&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  Work& operator=(Work other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Work() {
    if (state_ != nullptr) state_->Unref();
  }

  // True once the result is in place or the operation has failed. Never blocks.
  bool Done() const { return state_ == nullptr || state_->Done(); }

  // Blocks until Done and returns the outcome; meanwhile the calling thread does the group's work. When `deadline`
  // passes first, returns DeadlineExceeded and the operation goes on (its own time-out, see GroupOptions, is another
  // matter and aborts the group).
  absl::Status Wait(absl::Time deadline = absl::InfiniteFuture()) {
    return state_ == nullptr ? absl::OkStatus() : state_->Wait(deadline);
  }

  // Orders everything submitted to `stream` from now on after this operation; the host goes on at once. On CPU streams:
  // waits.
  absl::Status BlockStream(Stream stream) { return state_ == nullptr ? absl::OkStatus() : state_->BlockStream(stream); }

 private:
  internal::WorkState* state_ = nullptr;
};

// Memory that a group can reduce without copying it in or out. Owns the memory: it stays valid after the group is gone,
// until the last copy of the Allocation is. Zero at first.
class DDP_EXPORT Allocation {
 public:
  Allocation() = default;
  Allocation(std::shared_ptr<void> data, size_t bytes, Device device)
      : data_(std::move(data)), bytes_(bytes), device_(device) {}

  void* data() const { return data_.get(); }
  const std::shared_ptr<void>& owner() const { return data_; }  // keeps the memory alive
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  // The `count` elements of `dtype` that begin `offset_bytes` into the memory. The range must lie inside it.
  Buffer View(DType dtype, size_t offset_bytes, size_t count) const {
    return Buffer{static_cast<char*>(data_.get()) + offset_bytes, count, dtype, device_};
  }

 private:
  std::shared_ptr<void> data_;
  size_t bytes_ = 0;
  Device device_;
};

struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  // result = postscale * reduce(prescale * input). Floating-point types only. kAvg multiplies postscale by 1 / size().
  double prescale = 1;
  double postscale = 1;
  // If set, 1 is stored there before the Work is done where the reduced result (after scaling, in the accumulation
  // type) has an infinity or a NaN; otherwise it is left alone. Equal on all ranks for AllReduce. Floating-point types
  // only.
  uint32_t* nonfinite = nullptr;
  // Names the operation in errors, in the flight recorder and in the timeline: the bucket of gradients that it reduces.
  int bucket = -1;
};

// The ranks that an error of a group is about: those that have died or left, or did not arrive in time. Empty where
// nobody in particular is to blame (Aborted, FailedPrecondition). The same on all ranks. See Context::NewGroup.
DDP_EXPORT std::vector<int> FailedRanks(const absl::Status& error);

// A fixed set of ranks, 0 to size() - 1, that do collective operations together. Made by Context.
//
// Contract of every operation. All ranks make the same calls in the same order, with equal counts, dtypes and options.
// The call returns at once with a Work; inputs may not be changed and outputs not be read until it is done. In place:
// where `out` overlaps `in`, each element of out is the element of in at its own place, as described, and both have the
// same size; anything else, and out buffers that overlap each other, is InvalidArgument. Operations of one group take
// effect in the order of the calls. `after`: the operation begins when the work submitted to that stream so far has
// finished (no meaning on CPU).
//
// Arithmetic. 16-bit floats are accumulated in float32 and rounded once. On the hierarchical backend contributions are
// added in rank order, where there are several nodes first those of each node and then the nodes' sums in the order of
// the nodes, and scaled after the sum: all ranks get the same bits, whatever the split into calls, the timing, and the
// processor's vector width.
//
// Errors. InvalidArgument at the call: the caller's mistake, nothing has happened. From Work::Wait, and then from every
// later call, since a failed group stays failed: DeadlineExceeded (the operation's time-out; names the operation and
// the ranks that did not arrive), Unavailable (a peer has died; names it), FailedPrecondition (ranks disagree about the
// operation; names both sides), Aborted (carries the cause). What a failed operation leaves in its outputs is
// undefined, but from the error on nobody else writes there: a peer that was stopped in the middle and wakes up later
// finds other memory behind its addresses. (Ranks that are threads of one process have only one memory; there the error
// waits until no peer is in the middle.)
//
// Thread-safety: all methods may be called from any thread; concurrent operations on one group are serialised inside,
// in an order that is the caller's duty to keep equal on all ranks.
//
//   auto buffer = group.Allocate(bytes, Device{});
//   auto work = group.AllReduce({buffer->View(DType::kFloat32, 0, n)}, {...same...}, {.op = ReduceOp::kAvg});
//   absl::Status status = work.ok() ? work->Wait() : work.status();
class DDP_EXPORT ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual absl::string_view backend() const = 0;  // "nccl", "hierarchical", "local"
  // Where its fast memory is. A GPU's group serves CPU memory, too.
  virtual Device device() const { return Device{}; }

  // out[i] = reduction over ranks of in[i]. The total counts of in and out are equal; out may have another
  // floating-point type than in (float32 and the 16-bit types convert to each other), in place one of the same size.
  virtual absl::StatusOr<Work> AllReduce(Buffers in, Buffers out, const ReduceOptions& options = {},
                                         Stream after = {}) = 0;

  // Copies root's buffers to all ranks. On CPU memory of one host up to 8 KiB, and where that pays up to 64 KiB, travel
  // with the call: the root's Work is done at once, a receiver's when the root has called, and the root may be ahead by
  // up to 128 operations (with more than 8 ranks 32). That another rank calls something else, or nothing, they may then
  // be told only by the next operation that waits for it.
  virtual absl::StatusOr<Work> Broadcast(Buffers buffers, int root, Stream after = {}) = 0;

  // out = the inputs of all ranks, end to end, in rank order: count(out) = size() * count(in). In place: in lies at its
  // own place in out.
  virtual absl::StatusOr<Work> AllGather(Buffers in, Buffers out, Stream after = {}) = 0;

  // The same with uneven inputs: rank r gives counts[r] elements (perhaps none), and `out` has as many as all together.
  // `counts`, one for each rank, is equal on all of them, and not needed after the call.
  virtual absl::StatusOr<Work> AllGatherV(Buffers in, Buffers out, absl::Span<const size_t> counts,
                                          Stream after = {}) = 0;

  // in and out consist of size() equal parts: part r of in goes to rank r, part r of out comes from there. In place: in
  // and out are the same.
  virtual absl::StatusOr<Work> AllToAll(Buffers in, Buffers out, Stream after = {}) = 0;

  // out = this rank's part of the reduction of in: count(in) = size() * count(out). In place: out lies at its own place
  // in in.
  virtual absl::StatusOr<Work> ReduceScatter(Buffers in, Buffers out, const ReduceOptions& options = {},
                                             Stream after = {}) = 0;

  // A message to one rank, which receives it with equal tag, dtype and count. Messages with one tag between two ranks
  // are received in the order in which they were sent; with different tags, in any. Neither call waits for the other or
  // for collective operations: Send is done when the buffers may be used again, which for a small message is at once. A
  // receiver that does not call Recv holds its sender up, but not for ever while it waits for something else: the
  // message is then taken over into memory of the library. Tags are 0 to 2^30 - 1; those above are for
  // ddp/collectives.h.
  //
  // On a GPU, over NCCL: messages are carried in the order of the calls, on the same stream as collective operations,
  // cut into the same ranges on both sides, and tags are not compared. Of two ranks that send to each other one has to
  // receive first.
  //
  // Errors name both ranks, the tag and the bytes: FailedPrecondition if dtypes or counts differ (on the sender of a
  // small message, by its next call), DeadlineExceeded if no message with the tag comes, or nobody receives it.
  virtual absl::StatusOr<Work> Send(Buffers buffers, int to, int tag, Stream after = {}) = 0;
  virtual absl::StatusOr<Work> Recv(Buffers buffers, int from, int tag, Stream after = {}) = 0;

  // Done when all ranks have made the call, and all collective operations that they called before are done.
  virtual absl::StatusOr<Work> Barrier() = 0;

  // Memory of `bytes` bytes (> 0) on every rank, zeroed and page-aligned. Collective: all ranks ask for the same size
  // in the same order. ResourceExhausted where memory is short (on every rank).
  virtual absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) = 0;

  // A group of those ranks that give the same `color`, ordered by `key` and, where keys are equal, by their rank here.
  // A negative color gives no group (a null pointer). Collective, and blocks. The new group works for itself: neither
  // waits for operations of the other, and a failure or Abort of one does not fail the other, but for a rank that dies,
  // which fails both. It may outlive this group, not the Context.
  virtual absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) = 0;

  // Makes memory that another group has allocated this group's: from now on it is reduced here where it lies. Addresses
  // and contents stay. For survivors that go on in a smaller group (DistributedDataParallel::Rebind calls it); the
  // earlier group, if it still works, copies the memory in and out from now on. Collective: all ranks give memory of
  // one size, in the same order; no operation on it is under way in any group, and no thread touches it during the
  // call. ResourceExhausted where memory is short (on every rank; the contents are kept), FailedPrecondition where
  // sizes differ, InvalidArgument for memory that no Allocate returned.
  virtual absl::Status Register(const Allocation& memory) = 0;

  // Fails the group on all ranks: every Work that is not done, here and on the peers, ends with Aborted carrying `why`.
  // Any thread, at any time. Only the first cause counts.
  virtual void Abort(absl::Status why) = 0;

  // OK, or the first cause of failure.
  virtual absl::Status status() const = 0;

  // On a GPU: a word that kernels can read, 0 until the group fails. It changes before any stream that waits for an
  // operation of the group is released, so that what follows on the stream can know that its input is garbage. Null on
  // CPU. As long-lived as the group.
  virtual const uint32_t* failed_word() const { return nullptr; }

  // Does whatever part of the group's pending operations this rank can do now without waiting, so that a program that
  // is busy elsewhere keeps its peers from waiting. Cheap when nothing is pending.
  virtual void Progress() = 0;

  // Who wants to be told of what happens in the group, beyond its operations; null if nobody does.
  virtual Observer* observer() const = 0;
};

}  // namespace ddp

#endif  // DDP_PROCESS_GROUP_H_
