// SPDX-License-Identifier: Apache-2.0
// Large all-reduces by the copy engines: faster than kernels that load and store over the bus, and the GPU's processors
// stay free but for the additions.
#ifndef LIBDDP_COMM_STAGED_STAGED_COPIES_H_
#define LIBDDP_COMM_STAGED_STAGED_COPIES_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libddp/comm/ring/staging_ring.h"
#include "libddp/device/device_runtime.h"
#include "libddp/device/staged_turn.h"

namespace ddp {

// One rank's streams, events and GPU memory for that. Each lane has a stream down to host memory and one up from it;
// the group's own stream reduces. So a chunk comes down while the one before it goes up, and the turns between copies
// of one lane pass while the other lane copies.
//
// Nobody waits for ever even if a GPU carries out one thing at a time, in any order that streams and events allow:
// streams may share a queue, and the branches of a graph too. The words to the peers have an order, in which that
// chunk k is up comes after that chunk k + 2 is down and before that k + 3 is. What waits for a peer's word comes after
// all of this rank's own that are not later than that. So whoever waits for the earliest word waits for a rank that has
// given it, or is about to.
//
// Enqueue is called by one thread at a time, with the device current.
class StagedCopies {
 public:
  // The shared memory that slots for chunks of up to `chunk` bytes take. A multiple of 4096.
  static StagingRing::Beside Shared(int ranks, uint64_t chunk);

  // `ring` has Shared beside it.
  static absl::StatusOr<std::shared_ptr<StagedCopies>> Create(std::shared_ptr<StagingRing> ring, DeviceRuntime& runtime,
                                                              Device device, uint64_t chunk);

  // Enqueues the all-reduce that `c` describes, in chunks of `chunk_elements` (a multiple of 16 bytes, and no more than
  // a slot holds), in the order of `stream`.
  absl::Status AllReduce(staged::Collective c, uint64_t chunk_elements, void* stream);

 private:
  static constexpr uint64_t kTold = 4;  // of a lane's last chunks
  struct Lane {
    OwnedStream stream[staged::kWays];
    OwnedEvent told[staged::kWays][kTold];   // the peers know of a chunk; by its number
    OwnedEvent reduced[staged::kCopyDepth];  // by number of the chunk
  };
  struct Step {                      // one chunk's
    uint64_t index, number, chunks;  // among all, and in its lane, which has so many
    int lane;
    staged::Chunk chunk;
  };

  StagedCopies(std::shared_ptr<StagingRing> ring, DeviceRuntime& runtime, uint64_t chunk)
      : ring_(std::move(ring)), runtime_(runtime), chunk_(chunk) {}
  absl::Status MakeStreams();
  absl::Status Down(const staged::Collective& c, const Step& step);
  absl::Status Up(const staged::Collective& c, const Step& step);
  absl::Status Reduce(staged::Collective c, const Step& step, void* stream);
  absl::Status TakeTurn(const staged::Collective& c, staged::Way way, const Step& step, bool waits, uint64_t number);
  const OwnedEvent& Told(staged::Way way, uint64_t index) const;
  // `way` of this chunk goes on when the peers know that chunk step.index - before is `told`.
  absl::Status AfterTelling(staged::Way way, const Step& step, staged::Way told, uint64_t before);
  // Copies of one way follow each other, so that the first chunk is through first.
  absl::Status AfterTheLast(staged::Way way, const Step& step);

  char* SlotOf(int rank, const Step& step) const;        // in the shared memory
  char* FetchedInto(int ranks, const Step& step) const;  // in the GPU's

  const std::shared_ptr<StagingRing> ring_;
  DeviceRuntime& runtime_;
  const uint64_t chunk_;
  std::shared_ptr<void> memory_;  // the GPU's: the counts, then what is fetched
  Lane lanes_[staged::kCopyLanes];
  OwnedEvent begin_, copied_[staged::kWays];
};

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_STAGED_COPIES_H_
