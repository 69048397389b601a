// SPDX-License-Identifier: Apache-2.0
// All-reduces on GPU memory whose sums the processors of the host take: DDP_STAGED_REDUCE.
#ifndef LIBDDP_COMM_STAGED_HOST_MOVES_H_
#define LIBDDP_COMM_STAGED_HOST_MOVES_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/gpu/large_sum_moves.h"
#include "libddp/comm/staged/host_pipeline.h"

namespace ddp {

// Host memory for a stage that the ranks of `group`, all of one node, see together, so that an all-reduce of the group
// on it copies nothing. up_stream: with one. Collective; if a rank fails, all do. ResourceExhausted if there is too
// little memory, or it cannot be registered.
absl::StatusOr<HostStage> ShareHostStage(ProcessGroup& group, DeviceRuntime& runtime, Device device, bool up_stream);

// Each GPU copies its array down, the group on CPU memory reduces it, and each GPU copies the result up. So every byte
// crosses the bus once each way, where GPUs that reduce by themselves read their shares in addition.
absl::Status AllReduceOnHost(HostPipeline& pipeline, absl::Duration timeout, Buffers in, Buffers out,
                             const ReduceOptions& options, void* stream);

// All-reduces of `from` bytes of input and more go so. The results have the same bits as those of `moves`. The ranks
// are all on one node.
class HostMoves final : public LargeSumMoves {
 public:
  // `control` and `engine` outlive this.
  HostMoves(std::shared_ptr<NodeGroups> groups, HostStage stage, uint64_t from, std::unique_ptr<DeviceMoves> moves,
            ProcessGroup& control, const DeviceEngine& engine);

  absl::Status MayBeCaptured() const override;

 private:
  absl::Status AllReduce(const CheckedCall& call, void* stream) override;

  ProcessGroup& control_;
  HostPipeline pipeline_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_HOST_MOVES_H_
