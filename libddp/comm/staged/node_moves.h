// SPDX-License-Identifier: Apache-2.0
// What the operations of a GPU's group of the hierarchical backend enqueue where its ranks are on several nodes: data
// go through pinned memory of the host, whose thread moves them between the nodes by groups on CPU memory.
#ifndef LIBDDP_COMM_STAGED_NODE_MOVES_H_
#define LIBDDP_COMM_STAGED_NODE_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/gpu/device_moves.h"
#include "libddp/comm/staged/host_pipeline.h"
#include "libddp/comm/staged/node_groups.h"
#include "libddp/device/buffer_ops.h"

namespace ddp {

// An all-reduce takes each chunk of the array through three stages:
//   - the GPUs of a node reduce it, without rounding; each has the node's sum of its share in host memory then;
//   - the host's thread reduces the share over the nodes, with the ranks that have the same share there;
//   - the GPUs of a node gather the shares.
// Every other operation is that of the group on CPU memory: a chunk is copied to the host, moved there, and copied
// back. The first and the last stage of some chunks run while others are between the nodes. Results have the same bits
// as on CPU memory with the same nodes.
class NodeMoves final : public DeviceMoves {
 public:
  // `in_node`: the moves of this node's ranks. `control` and `engine` outlive this.
  NodeMoves(std::shared_ptr<NodeGroups> groups, HostStage stage, std::unique_ptr<DeviceMoves> in_node,
            ProcessGroup& control, const DeviceEngine& engine);

  absl::string_view backend() const override { return "hierarchical"; }
  absl::Status MayBeCaptured() const override;
  uint64_t Shape(const CheckedCall&) const override { return 0; }
  absl::Status Enqueue(const CheckedCall& call, void* stream) override;
  absl::Status Send(Buffers buffers, int peer, void* stream) override;
  absl::Status Recv(Buffers buffers, int peer, void* stream) override;
  absl::Status Barrier(void* stream) override;
  absl::StatusOr<Allocation> Allocate(size_t bytes) override {
    return AllocateTogether(control_, runtime_, engine_.options().device, bytes);
  }
  absl::Status Adopt(const Allocation&) override { return absl::OkStatus(); }

 private:
  static constexpr size_t kSlotBytes = HostStage::kSlotBytes;
  using Chunk = HostPipeline::Chunk;

  // Ranges that stand end to end; counts[p] elements are part p.
  struct Parts {
    Buffers buffers;
    std::vector<size_t> counts;
  };
  // The elements [begin, begin + step) of each part but `left_out`.
  struct Cut {
    std::vector<Buffer> buffers;
    std::vector<size_t> counts;
    size_t elements = 0;
  };
  static constexpr size_t kNone = SIZE_MAX;
  static Cut CutParts(const Parts& parts, size_t begin, size_t step, size_t left_out = kNone);

  absl::Status AllReduce(const CheckedCall& call, void* stream);
  absl::Status Collect(const CheckedCall& call, void* stream);
  absl::Status Exchange(const Parts& in, const Parts& out, void* stream);

  // `in` and `out` hold what the two name.
  static absl::Status SendAndReceive(ProcessGroup& group, const Cut& from, const Buffer& in, const Cut& to,
                                     const Buffer& out);
  Call CallOf(const CheckedCall& call) const;
  Parts Whole(Buffers buffers) const { return {buffers, {Elements(buffers)}}; }
  Parts Each(Buffers buffers, size_t count) const { return {buffers, std::vector<size_t>(ranks(), count)}; }
  Parts OneFor(int rank, Buffers buffers) const;
  size_t ranks() const { return static_cast<size_t>(groups_->size()); }

  const std::shared_ptr<NodeGroups> groups_;
  const std::unique_ptr<DeviceMoves> in_node_;
  ProcessGroup& control_;
  const DeviceEngine& engine_;
  DeviceRuntime& runtime_;
  HostPipeline pipeline_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_NODE_MOVES_H_
