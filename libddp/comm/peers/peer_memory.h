// SPDX-License-Identifier: Apache-2.0
// GPU memory that the GPUs of all ranks of a host read and write.
#ifndef LIBDDP_COMM_PEERS_PEER_MEMORY_H_
#define LIBDDP_COMM_PEERS_PEER_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/ring/staging_ring.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// One rank's view of what the ranks of a group have allocated together. This rank's memory is freed when all ranks have
// done with their views, which the memory beside the ring tells: until then a copy that a peer has enqueued may still
// come. What a rank that died, or that has failed, has not done with stays until the process ends.
class PeerMemory {
 public:
  // Of the shared memory beside the ring, from its beginning on.
  static size_t SharedBytes(int ranks);

  // Collective over `control`: `bytes` of zeros on each rank. If a rank fails, all do; FailedPrecondition if GPUs do
  // not reach each other's memory.
  static absl::StatusOr<std::unique_ptr<PeerMemory>> Create(ProcessGroup& control, DeviceRuntime& runtime,
                                                            Device device, std::shared_ptr<StagingRing> ring,
                                                            size_t bytes);
  ~PeerMemory();
  // Frees this GPU's memory of groups with which all ranks have done; as Create and the destructor do. Each GPU's is
  // left to its own rank: to free it may wait for what the GPU does, which may wait for the rank that frees it.
  static void FreeWhatIsDone(Device device);

  // Where this rank's GPU sees rank r's memory.
  char* of(int r) const { return static_cast<char*>(views_[static_cast<size_t>(r)].get()); }

 private:
  // A rank's memory, also after its end, as long as peers may use it.
  struct Own {
    Device device;
    std::shared_ptr<StagingRing> ring;
    std::shared_ptr<void> data = {};
    uint32_t* DoneWord(int rank) const;
    bool AllDone() const;
  };
  static void FreeWhatIsDone(Device device, Own* one_more);

  PeerMemory(Own own, int rank) : own_(std::move(own)), rank_(rank) {}

  Own own_;
  const int rank_;
  std::vector<std::shared_ptr<void>> views_;  // by rank
};

}  // namespace ddp

#endif  // LIBDDP_COMM_PEERS_PEER_MEMORY_H_
