// SPDX-License-Identifier: Apache-2.0
// Memory that NCCL reduces fastest: allocated by it, at the same offsets on all ranks, and registered with it.
#ifndef LIBDDP_COMM_NCCL_REGISTERED_MEMORY_H_
#define LIBDDP_COMM_NCCL_REGISTERED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/comm/nccl/communicator.h"
#include "libddp/comm/nccl/reduce_plan.h"

namespace ddp {

// Registered memory lets NCCL use its symmetric kernels: much faster for small sums, and slower for large ones on some
// machines. Where they cross is measured, on the first allocations that are large enough, and agreed by all ranks.
//
// What a caller gives back is kept, and given out again when all ranks have it back and ask for the same size: to
// deregister takes all ranks, too. Thread-safe; Allocate by one thread at a time.
class RegisteredMemory {
 public:
  // `control` carries what ranks have to agree on, and outlives this.
  RegisteredMemory(std::shared_ptr<NcclCommunicator> communicator, ProcessGroup& control);
  ~RegisteredMemory();

  // Collective. Zeroed. Where NCCL cannot register it, it is ordinary device memory.
  absl::StatusOr<Allocation> Allocate(size_t bytes);

  // Collective; memory of the same size on all ranks. Registers what another group has allocated, and keeps it alive.
  // Where NCCL does not register it, as the program's own, it is reduced like any other.
  absl::Status Adopt(const Allocation& memory);

  // Whether all of `buffer` is registered.
  bool Holds(const Buffer& buffer) const;

  // How `buffer` is best reduced, in a call of `total` bytes.
  ReducePath PathOf(const Buffer& buffer, size_t total) const;

  // Sums of fewer bytes than this use the symmetric kernels, as far as has been measured.
  size_t crossover_bytes() const;

 private:
  struct Block {
    uint64_t id = 0;
    void* data = nullptr;
    size_t bytes = 0;
    bool registered = false;
    bool returned = false;
    Allocation adopted;  // another group's memory
  };
  // Outlives this for as long as an Allocation does.
  struct Table {
    std::mutex mutex;
    std::vector<Block> blocks;
    bool open = true;  // the group lives
    NcclSetup setup;
    void Free(void* data);
  };

  absl::StatusOr<Allocation> AllocateOrdinary(size_t bytes);
  absl::StatusOr<Block> Agree(size_t bytes);
  absl::StatusOr<Block> Make(size_t bytes);
  absl::Status Register(Block* block);
  absl::Status Calibrate(const Block& block);
  absl::StatusOr<double> TimeSum(const Block& block, size_t bytes, bool symmetric, void* stream);
  Allocation HandOut(const Block& block);
  // Whether [data, data + bytes) lies in a block for which which(block) is true.
  template <typename Which>
  bool Any(const void* data, size_t bytes, Which which) const;
  bool Owns(const Allocation& memory) const;  // whether it is from Allocate, and not another group's

  const std::shared_ptr<NcclCommunicator> communicator_;
  ProcessGroup& control_;
  const std::shared_ptr<Table> table_;
  uint64_t next_id_ = 0;
  bool declined_ = false;                    // by NCCL, to register memory
  size_t measured_bytes_ = 0;                // the largest size that Calibrate has seen
  std::atomic<size_t> crossover_{SIZE_MAX};  // see crossover_bytes
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NCCL_REGISTERED_MEMORY_H_
