// SPDX-License-Identifier: Apache-2.0
// What the operations of a GPU's group of the hierarchical backend enqueue: one kernel each, which moves the data
// through host memory, or for large all-reduces what StagedCopies does.
#ifndef LIBDDP_COMM_STAGED_STAGED_MOVES_H_
#define LIBDDP_COMM_STAGED_STAGED_MOVES_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/gpu/device_moves.h"
#include "libddp/comm/ring/staged_plan.h"
#include "libddp/comm/ring/staging_ring.h"
#include "libddp/comm/staged/staged_copies.h"
#include "libddp/device/staged_messages.h"
#include "libddp/device/staged_protocol.h"

namespace ddp {

// Reductions follow the rules of CpuReduce: contributions are added in rank order, 16-bit floats in float32, and the
// result is rounded once. So all ranks have the same bits, which are those of the CPU's group, however an array is cut
// into ranges and operations. The ranks need not cut theirs alike.
class StagedMoves final : public DeviceMoves, public BlockMoves {
 public:
  // `control` and `engine` outlive this. blocks: see PlanTiles; equal on all ranks, as `limits`. copies: null if these
  // use none.
  StagedMoves(std::shared_ptr<StagingRing> ring, std::shared_ptr<StagedCopies> copies, ProcessGroup& control,
              const DeviceEngine& engine, int blocks, const StagedLimits& limits)
      : ring_(std::move(ring)),
        copies_(std::move(copies)),
        control_(control),
        engine_(engine),
        runtime_(engine.runtime()),
        at_(ring_->PlaceOf(engine.words())),
        blocks_(blocks),
        limits_(limits) {}
  ~StagedMoves() override;

  absl::string_view backend() const override { return "hierarchical"; }
  uint64_t Shape(const CheckedCall&) const override { return 0; }
  absl::Status Enqueue(const CheckedCall& call, void* stream) override;
  absl::Status Send(Buffers buffers, int peer, void* stream) override;
  absl::Status Recv(Buffers buffers, int peer, void* stream) override;
  absl::Status Barrier(void* stream) override;
  BlockMoves* block_moves() override { return this; }
  absl::Status ReduceBlocks(const BlockReduce& reduce, void* stream) override;
  absl::StatusOr<Allocation> Allocate(size_t bytes) override {
    return AllocateTogether(control_, runtime_, engine_.options().device, bytes);
  }
  absl::Status Adopt(const Allocation&) override { return absl::OkStatus(); }

 private:
  // counts[r]: elements that go to, or come from, rank r; end to end in the buffers.
  struct Parts {
    Buffers buffers;
    std::vector<size_t> counts;
  };

  staged::Collective Prepare(const CheckedCall& call) const;
  absl::Status Collect(const CheckedCall& call, void* stream);
  absl::Status AllToAll(const CheckedCall& call, void* stream);
  absl::Status Exchange(const Parts& in, const Parts& out, void* stream);
  std::vector<size_t> OneFor(int rank, Buffers buffers) const;
  size_t ranks() const { return static_cast<size_t>(at_.ranks); }

  std::shared_ptr<StagingRing> ring_;
  std::shared_ptr<StagedCopies> copies_;
  ProcessGroup& control_;
  const DeviceEngine& engine_;
  DeviceRuntime& runtime_;
  const staged::Place at_;
  const int blocks_;
  const StagedLimits limits_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_STAGED_MOVES_H_
