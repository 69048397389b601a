// SPDX-License-Identifier: Apache-2.0
// What a backend enqueues on a GPU's communication stream, and the GPU memory that it works on best.
#ifndef LIBDDP_COMM_GPU_DEVICE_MOVES_H_
#define LIBDDP_COMM_GPU_DEVICE_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/block_reducer.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// What BlockReducer enqueues. There are elements.
class BlockMoves {
 public:
  virtual absl::Status ReduceBlocks(const BlockReduce& reduce, void* stream) = 0;

 protected:
  ~BlockMoves() = default;
};

// One per backend: nccl, hierarchical, and local for a world of one. What enqueues is called by one thread at a time,
// with the group's device current.
class DeviceMoves {
 public:
  virtual ~DeviceMoves() = default;
  // ProcessGroup::backend.
  virtual absl::string_view backend() const = 0;

  // InvalidArgument, with the reason, if operations cannot be captured into a CUDA graph.
  virtual absl::Status MayBeCaptured() const { return absl::OkStatus(); }
  // A hash of what must be equal on all ranks besides the call's key, count and parameters.
  virtual uint64_t Shape(const CheckedCall& call) const = 0;
  // A collective call that has elements, or an all-to-all with counts; not a barrier, nor a reduce-scatter with counts,
  // which is made of reductions.
  virtual absl::Status Enqueue(const CheckedCall& call, void* stream) = 0;
  virtual absl::Status Send(Buffers buffers, int peer, void* stream) = 0;
  virtual absl::Status Recv(Buffers buffers, int peer, void* stream) = 0;
  virtual absl::Status Barrier(void* stream) = 0;
  // Null if the backend has none.
  virtual BlockMoves* block_moves() { return nullptr; }

  // Zeroed memory of the group's device. Collective, and so is Adopt: memory that another group has allocated.
  virtual absl::StatusOr<Allocation> Allocate(size_t bytes) = 0;
  virtual absl::Status Adopt(const Allocation& memory) = 0;
};

// A hash of how the buffers are cut into ranges, joined with `hash`.
uint64_t MixHash(uint64_t hash, uint64_t value);
uint64_t HashOfRanges(uint64_t hash, Buffers buffers);

// The pieces that lie in one range of `from` and one of `to`. Both hold the same number of elements.
std::vector<TransformPiece> PairPieces(Buffers from, Buffers to);

// Copies element by element on `stream`; what lies in place already is left alone.
absl::Status CopyPieces(DeviceRuntime& runtime, Buffers from, Buffers to, void* stream);

// Memory of `device` from the runtime itself: any rank may ask for it on its own.
absl::StatusOr<Allocation> AllocatePlain(DeviceRuntime& runtime, Device device, size_t bytes);

// The same on all ranks of `control`, or on none: FailedPrecondition if they ask for different sizes.
absl::StatusOr<Allocation> AllocateTogether(ProcessGroup& control, DeviceRuntime& runtime, Device device, size_t bytes);

// No memory is left, for this reason.
absl::Status NoGpuMemory(size_t bytes, absl::string_view why);

// Memory for one operation, in the stream's order.
class StreamScratch {
 public:
  StreamScratch(DeviceRuntime& runtime, void* stream) : runtime_(runtime), stream_(stream) {}
  ~StreamScratch() {
    if (buffer_.data != nullptr) runtime_.FreeOnStream(buffer_.data, stream_).IgnoreError();
  }
  StreamScratch(const StreamScratch&) = delete;
  StreamScratch& operator=(const StreamScratch&) = delete;

  absl::Status Allocate(size_t count, DType dtype, Device device);
  // As much as `like` holds.
  absl::Status AllocateFor(Buffers like);
  Buffers buffers() const { return {&buffer_, 1}; }

 private:
  DeviceRuntime& runtime_;
  void* const stream_;
  Buffer buffer_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_DEVICE_MOVES_H_
