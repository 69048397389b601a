// SPDX-License-Identifier: Apache-2.0
// Operations on GPU memory in which the host takes part: chunks of an array go down to host memory, through the host's
// thread, and up again.
#ifndef LIBDDP_COMM_STAGED_HOST_PIPELINE_H_
#define LIBDDP_COMM_STAGED_HOST_PIPELINE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/gpu/device_moves.h"
#include "libddp/comm/staged/host_part.h"
#include "libddp/comm/staged/node_groups.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// What a pipeline works with. Made before the group, so that ranks can agree on whether all have it.
struct HostStage {
  static constexpr size_t kSlots = 3;  // chunks under way
  // Of one chunk, on either side: what comes from the GPU, and what goes there.
  static constexpr size_t kSlotBytes = size_t{4} << 20;
  static constexpr size_t kBytes = 2 * kSlots * kSlotBytes;

  // A stream for what goes up, so that both ways of the bus are busy at once.
  struct UpStream {
    OwnedStream stream;
    OwnedEvent begin, through[kSlots];
  };

  // Of the current device. `slots` and `slots_of_gpu`: kBytes of host memory by the host's address, and by the GPU's.
  static absl::StatusOr<HostStage> Create(DeviceRuntime& runtime, char* slots, std::shared_ptr<void> slots_of_gpu);
  absl::Status MakeUpStream(DeviceRuntime& runtime);

  std::shared_ptr<HostPart> host;
  char* slots = nullptr;
  std::shared_ptr<void> slots_of_gpu;
  std::shared_ptr<UpStream> up;  // null: everything is in the order of the operation's stream
  uint64_t* left = nullptr;      // of the ring whose kernels the stream runs, if it has one
};

class HostPipeline {
 public:
  // failed: see HostPart::Start. may_still_run(): at the end, whether the GPU may look at the memory yet.
  HostPipeline(
      std::shared_ptr<NodeGroups> groups, HostStage stage, DeviceRuntime& runtime, const uint32_t* failed,
      std::function<bool()> may_still_run = [] { return false; });
  // Of a group, whose engine outlives this.
  HostPipeline(std::shared_ptr<NodeGroups> groups, HostStage stage, const DeviceEngine& engine)
      : HostPipeline(std::move(groups), std::move(stage), engine.runtime(), engine.failed_word(),
                     [&engine] { return engine.MayStillRun(); }) {}
  ~HostPipeline();
  HostPipeline(const HostPipeline&) = delete;
  HostPipeline& operator=(const HostPipeline&) = delete;

  // One chunk: what the GPU does before and behind the host's job.
  struct Chunk {
    std::function<absl::Status()> down;  // on the operation's stream
    HostPart::Job job;
    std::function<absl::Status(void* stream)> up;
  };
  // make(k, slot) is called for each k < chunks, in order. The stages of different chunks overlap.
  absl::Status Run(size_t chunks, void* stream, absl::FunctionRef<Chunk(size_t k, size_t slot)> make);

  const std::shared_ptr<NodeGroups>& groups() const { return groups_; }
  DeviceRuntime& runtime() const { return runtime_; }
  // By the GPU's address.
  char* in_slot(size_t slot) const {
    return static_cast<char*>(stage_.slots_of_gpu.get()) + 2 * slot * HostStage::kSlotBytes;
  }
  char* out_slot(size_t slot) const { return in_slot(slot) + HostStage::kSlotBytes; }
  // The same memory for the host.
  Buffer SeenByHost(Buffer slot) const {
    slot.data = stage_.slots + (static_cast<char*>(slot.data) - static_cast<char*>(stage_.slots_of_gpu.get()));
    return slot;
  }

 private:
  const std::shared_ptr<NodeGroups> groups_;
  const HostStage stage_;
  DeviceRuntime& runtime_;
  const std::function<bool()> may_still_run_;
};

// Of host memory.
inline Buffer HostBuffer(char* data, size_t count, DType type) { return {data, count, type, Device{}}; }

// Copies, and looks for what is not finite on the way if `nonfinite` is set.
absl::Status CopyChecked(DeviceRuntime& runtime, Buffers from, Buffers to, uint32_t* nonfinite, void* stream);

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_HOST_PIPELINE_H_
