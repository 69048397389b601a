// SPDX-License-Identifier: Apache-2.0
// What the operations of a group of the nccl backend enqueue: calls of NCCL, and kernels of ours before and after.
#ifndef LIBDDP_COMM_NCCL_NCCL_MOVES_H_
#define LIBDDP_COMM_NCCL_NCCL_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/comm/gpu/device_moves.h"
#include "libddp/comm/nccl/communicator.h"
#include "libddp/comm/nccl/reduce_plan.h"
#include "libddp/comm/nccl/registered_memory.h"

namespace ddp {

// In reductions, broadcasts and all-gathers several ranges on either side are paired piece by piece; the pieces go as
// one group call. All ranks must have cut their ranges alike (the engine's board finds out where they have not). One
// thread at a time.
//
// NCCL sends a message straight from one rank's registered memory into the other's. If only one side is registered,
// both wait for ever (seen with 2.28.3 and 4 MiB, described in NCCL as a duty of the caller). So messages go through
// memory that is not registered, unless both sides are known to be.
//
// NCCL's symmetric kernels are wrong on registered memory where a range, or a rank's part, does not begin at a multiple
// of 4 bytes (seen with 2.28.3, bfloat16 and int8). Such ranges are reduced in other memory, and gathered by
// broadcasts, which have no symmetric kernel.
class NcclMoves final : public DeviceMoves {
 public:
  // `control` carries what ranks have to agree on, and outlives this.
  NcclMoves(std::shared_ptr<NcclCommunicator> communicator, ProcessGroup& control);
  // Ends the communicator, before its memory goes.
  ~NcclMoves() override { communicator_->Destroy(); }

  absl::string_view backend() const override { return "nccl"; }
  uint64_t Shape(const CheckedCall& call) const override;
  absl::Status Enqueue(const CheckedCall& call, void* stream) override;
  absl::Status Send(Buffers buffers, int peer, void* stream) override;
  absl::Status Recv(Buffers buffers, int peer, void* stream) override;
  absl::Status Barrier(void* stream) override;
  absl::StatusOr<Allocation> Allocate(size_t bytes) override { return memory_.Allocate(bytes); }
  absl::Status Adopt(const Allocation& memory) override { return memory_.Adopt(memory); }

 private:
  using Calls = absl::FunctionRef<nccl::Result(const nccl::Api&, nccl::Comm)>;

  absl::Status Group(absl::string_view what, Calls calls);
  // Whether an operation in which each rank has `part` of `whole` must keep off the symmetric kernels. All ranks must
  // find the same, although in place their parts lie at different addresses. For an all-reduce, both are the whole.
  bool Misaligned(Buffers whole, Buffers part) const;
  ReduceTransport TransportOf(const CheckedCall& call) const;
  absl::Status Reduce(const CheckedCall& call, void* stream);
  absl::Status ReduceTo(const CheckedCall& call, void* stream);
  absl::Status Broadcast(Buffers buffers, int root, void* stream);
  absl::Status AllGather(Buffers in, Buffers out, void* stream);
  // counts: of each rank, which may be equal.
  absl::Status AllGatherV(Buffers in, Buffers out, absl::Span<const size_t> counts, void* stream);
  // Whether AllToAll of these sends straight from registered memory into registered memory: peers have to receive so.
  bool SendsFromRegistered(Buffers in, Buffers out) const;
  absl::Status AllToAll(Buffers in, Buffers out, void* stream);
  // What only the root uses is empty elsewhere.
  absl::Status Gather(Buffers in, Buffers out, int root, void* stream);
  absl::Status Scatter(Buffers in, Buffers out, int root, void* stream);
  bool AnyRegistered(Buffers buffers) const;
  // What becomes of a sum: all ranks get it, or a part each, or one rank (`root`) alone.
  struct Goal {
    bool scatter = false;
    int root = -1;
  };
  absl::Status ReduceWithNccl(Goal goal, const ReducePlan& plan, Buffers from, Buffers to, void* stream);
  // From where NCCL has put the result to where it belongs, or in place. `copy`: these are not the same.
  absl::Status StoreResult(const ReducePlan& plan, Buffers to, Buffers out, bool copy, uint32_t* nonfinite,
                           void* stream);

  // What goes to, or comes from, each rank: counts[r] elements of the buffers, in rank order.
  struct Parts {
    Buffers buffers;
    std::vector<size_t> counts;
    size_t Begin(size_t rank) const {
      return std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(rank), size_t{0});
    }
  };
  std::vector<size_t> OneFor(int rank, size_t count) const;
  // direct: all ranks send from registered memory into registered memory.
  absl::Status Exchange(const Parts& in, const Parts& out, bool direct, void* stream);

  const std::shared_ptr<NcclCommunicator> communicator_;
  RegisteredMemory memory_;
  DeviceRuntime& runtime_;
  const int rank_;
  const size_t size_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NCCL_NCCL_MOVES_H_
