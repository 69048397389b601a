// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/host_moves.h"

#include <algorithm>
#include <utility>

#include "libddp/base/round.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/device/buffer_ops.h"

namespace ddp {
namespace {

// Of a chunk. Several, so that one comes down while another is reduced; but each costs some microseconds.
constexpr size_t kLeastChunkBytes = size_t{256} << 10;
constexpr size_t kChunks = 4;

// Shared memory, which the GPU knows for as long.
struct SharedSlots {
  Allocation memory;
  std::shared_ptr<void> registered;  // released first
};

}  // namespace

absl::StatusOr<HostStage> ShareHostStage(ProcessGroup& group, DeviceRuntime& runtime, Device device, bool up_stream) {
  const auto slots = std::make_shared<SharedSlots>();
  absl::StatusOr<Allocation> memory = group.Allocate(HostStage::kBytes, Device{});
  if (!memory.ok()) return memory.status();
  slots->memory = *std::move(memory);
  absl::StatusOr<HostStage> stage = [&]() -> absl::StatusOr<HostStage> {
    const DeviceGuard guard(runtime, device);
    if (!guard.status().ok()) return guard.status();
    char* const data = static_cast<char*>(slots->memory.data());
    absl::StatusOr<std::shared_ptr<void>> registered = runtime.RegisterHost(data, HostStage::kBytes);
    if (!registered.ok()) return registered.status();
    slots->registered = *std::move(registered);
    absl::StatusOr<HostStage> made =
        HostStage::Create(runtime, data, std::shared_ptr<void>(slots, slots->registered.get()));
    if (!made.ok() || !up_stream) return made;
    if (absl::Status s = made->MakeUpStream(runtime); !s.ok()) return s;
    return made;
  }();
  if (absl::Status s = Agree(group, stage.status()); !s.ok()) return s;
  return stage;
}

absl::Status AllReduceOnHost(HostPipeline& pipeline, absl::Duration timeout, Buffers in, Buffers out,
                             const ReduceOptions& options, void* stream) {
  const DType from = in[0].dtype, to = out[0].dtype;
  const size_t count = Elements(in), size = std::max(SizeOf(from), SizeOf(to));
  const size_t step =
      std::clamp(RoundUp(count * size / kChunks, kLeastChunkBytes), kLeastChunkBytes, HostStage::kSlotBytes) / size;
  ReduceOptions on_host = options;
  on_host.nonfinite = nullptr;  // a GPU's
  DeviceRuntime& runtime = pipeline.runtime();
  return pipeline.Run(CeilDiv(count, step), stream, [&](size_t k, size_t slot) {
    const size_t first = k * step, n = std::min(step, count - first);
    const Buffer down = HostBuffer(pipeline.in_slot(slot), n, from);
    const Buffer up = from == to ? down : HostBuffer(pipeline.out_slot(slot), n, to);
    HostPipeline::Chunk chunk;
    chunk.down = [&, first, n, down] { return CopyPieces(runtime, Slice(in, first, n), {&down, 1}, stream); };
    chunk.job = [groups = pipeline.groups(), timeout, on_host, host_in = pipeline.SeenByHost(down),
                 host_out = pipeline.SeenByHost(up)] {
      const absl::Status set = groups->all->SetTimeout(timeout);
      return set.ok() ? groups->all->AllReduce(host_in, host_out, on_host).Wait() : set;
    };
    chunk.up = [&, first, n, up](void* up_stream) {
      return CopyChecked(runtime, {&up, 1}, Slice(out, first, n), options.nonfinite, up_stream);
    };
    return chunk;
  });
}

HostMoves::HostMoves(std::shared_ptr<NodeGroups> groups, HostStage stage, uint64_t from,
                     std::unique_ptr<DeviceMoves> moves, ProcessGroup& control, const DeviceEngine& engine)
    : LargeSumMoves(from, std::move(moves)),
      control_(control),
      pipeline_(std::move(groups), std::move(stage), engine) {}

absl::Status HostMoves::MayBeCaptured() const {
  return absl::InvalidArgumentError(
      "with DDP_STAGED_REDUCE=cpu or auto the host takes part in all-reduces of the hierarchical backend. Call it "
      "outside of the capture, or unset the variable");
}

absl::Status HostMoves::AllReduce(const CheckedCall& call, void* stream) {
  return AllReduceOnHost(pipeline_, control_.timeout(), call.in, call.out, *call.reduce, stream);
}

}  // namespace ddp
