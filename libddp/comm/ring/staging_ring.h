// SPDX-License-Identifier: Apache-2.0
// The host memory through which the GPUs of one host exchange data.
#ifndef LIBDDP_COMM_RING_STAGING_RING_H_
#define LIBDDP_COMM_RING_STAGING_RING_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/memory/shared_segment.h"
#include "libddp/device/device_runtime.h"
#include "libddp/device/staged_protocol.h"

namespace ddp {

// One rank's view of it: shared memory that its GPU reads and writes, and its own counts in the GPU's memory. Kernels
// move data in the ring, copy engines in what is beside it (StagedCopies). Where no data goes through host memory
// (PeerCopies) there are only the ring's abort words. Thread-safe.
class StagingRing {
 public:
  // Bytes of the same memory that are not the ring's: of all ranks in common, then of each. Multiples of 4096.
  struct Beside {
    uint64_t common = 0, each = 0;
    bool only_words = false;  // the ring has no more than its abort words
  };
  // Collective over `control`; if a rank fails, all do. ResourceExhausted if there is too little shared memory, or it
  // cannot be registered.
  // `node`: the NUMA node of this rank's GPU; -1: unknown.
  static absl::StatusOr<std::shared_ptr<StagingRing>> Create(ProcessGroup& control, DeviceRuntime& runtime,
                                                             Device device, int node, Beside beside);

  int size() const { return size_; }
  size_t bytes() const { return memory_->bytes(); }

  // For this rank's kernels. `failed`: see staged::Place.
  staged::Place PlaceOf(uint32_t* failed) const;

  // See staged::LeftOf.
  uint64_t* left() const { return staged::LeftOf(PlaceOf(nullptr)); }

  // The address that the GPU uses, and the host's; multiples of 4096.
  char* beside() const;
  char* beside_on_host() const;

  // Tells the kernels of all ranks to leave. What has failed stays so: nothing of it is used again.
  void Abort();
  // The same of this rank's kernels alone, for a graph that is launched when its group has gone.
  void Leave();

 private:
  StagingRing() = default;
  absl::Status Reserve(int node, Beside beside);
  absl::Status Register(DeviceRuntime& runtime, Device device);
  void SetAbortWords(int rank);
  uint32_t* abort_word(int rank, int index) const;

  int rank_ = 0, size_ = 1;
  size_t ring_bytes_ = 0;
  std::shared_ptr<SharedSegment> memory_;
  std::shared_ptr<void> registered_;  // by the address that the GPU uses; released before the memory
  std::shared_ptr<void> counts_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_RING_STAGING_RING_H_
