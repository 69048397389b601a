// SPDX-License-Identifier: Apache-2.0
// Large all-reduces between GPUs that reach each other's memory: copy engines move the data, so that the GPU's
// processors are free for the backward pass but for the additions.
#ifndef LIBDDP_COMM_PEERS_PEER_COPIES_H_
#define LIBDDP_COMM_PEERS_PEER_COPIES_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/peers/peer_memory.h"
#include "libddp/comm/ring/staging_ring.h"
#include "libddp/device/device_runtime.h"
#include "libddp/device/staged_meeting.h"

namespace ddp {

// The two phases of Rabenseifner's all-reduce, each a direct exchange between all ranks. A rank pushes to each peer
// what that has to reduce; when all have done so it reduces its own part, in rank order; when all have done so it pulls
// the peers' results. A larger array goes in several chunks, one after the other.
//
// A rank writes to slots that are made for it, and to its own arrays: what a late rank still does after a failure harms
// nobody who has gone on.
//
// The meetings are small kernels, which leave when the group fails. What is enqueued is fixed: it may be captured into
// a CUDA graph. AllReduce is called by one thread at a time, with the device current.
class PeerCopies {
 public:
  // Collective over `control`, the ranks of one host; if a rank fails, all do: FailedPrecondition if a GPU does not
  // reach another's memory, ResourceExhausted for want of memory. `chunk`: bytes of a chunk, at most; each rank gives
  // as much memory.
  static absl::StatusOr<std::shared_ptr<PeerCopies>> Create(ProcessGroup& control, DeviceRuntime& runtime,
                                                            Device device, uint64_t chunk);

  // Enqueues the all-reduce whose count, element sizes, arithmetic and sides `c` has, in the order of `stream`.
  // `failed`: see staged::Place.
  absl::Status AllReduce(staged::Collective c, uint32_t* failed, void* stream);

  StagingRing& ring() const { return *ring_; }

 private:
  PeerCopies(std::shared_ptr<StagingRing> ring, DeviceRuntime& runtime) : ring_(std::move(ring)), runtime_(runtime) {}

  // In rank r's memory: the slots of what the others push to it, in rank order; that of its result; the counters.
  char* SlotOf(int r, int index) const { return memory_->of(r) + static_cast<uint64_t>(index) * slot_; }
  char* PushedBy(int from, int to) const { return SlotOf(to, from < to ? from : from - 1); }
  char* ResultOf(int r) const { return SlotOf(r, ring_->size() - 1); }
  char* CountersOf(int r) const { return SlotOf(r, ring_->size()); }

  absl::Status Meet(const staged::Collective& c, void* stream);
  absl::Status Chunk(staged::Collective c, uint64_t begin, uint64_t count, void* stream);
  absl::Status Push(const staged::Collective& c, int to, uint64_t begin, uint64_t count, void* stream);
  absl::Status Pull(const staged::Collective& c, int from, uint64_t begin, uint64_t count, void* stream);

  const std::shared_ptr<StagingRing> ring_;
  DeviceRuntime& runtime_;
  uint64_t slot_ = 0;          // bytes
  std::shared_ptr<void> met_;  // see staged::Meeting
  std::unique_ptr<PeerMemory> memory_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_PEERS_PEER_COPIES_H_
