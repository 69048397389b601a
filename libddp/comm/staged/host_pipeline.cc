// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/host_pipeline.h"

#include <array>

#include "libddp/base/owner_process.h"

namespace ddp {

absl::StatusOr<HostStage> HostStage::Create(DeviceRuntime& runtime, char* slots, std::shared_ptr<void> slots_of_gpu) {
  absl::StatusOr<std::shared_ptr<HostPart>> host = HostPart::Create(runtime);
  if (!host.ok()) return host.status();
  return HostStage{*std::move(host), slots, std::move(slots_of_gpu), nullptr, nullptr};
}

absl::Status HostStage::MakeUpStream(DeviceRuntime& runtime) {
  auto made = std::make_shared<UpStream>();
  absl::StatusOr<OwnedStream> stream = MakeStream(runtime);
  if (!stream.ok()) return stream.status();
  made->stream = *std::move(stream);
  absl::Status status;
  const auto make_event = [&](OwnedEvent* event) {
    absl::StatusOr<OwnedEvent> event_made = MakeEvent(runtime);
    status.Update(event_made.status());
    if (event_made.ok()) *event = *std::move(event_made);
  };
  make_event(&made->begin);
  for (OwnedEvent& event : made->through) make_event(&event);
  if (status.ok()) up = std::move(made);
  return status;
}

HostPipeline::HostPipeline(std::shared_ptr<NodeGroups> groups, HostStage stage, DeviceRuntime& runtime,
                           const uint32_t* failed, std::function<bool()> may_still_run)
    : groups_(std::move(groups)),
      stage_(std::move(stage)),
      runtime_(runtime),
      may_still_run_(std::move(may_still_run)) {
  stage_.host->Start(failed, stage_.left);
}

// What is still to run would look at the memory. A job that runs still is one of a group that has failed.
HostPipeline::~HostPipeline() {
  stage_.host->Leave();
  if (may_still_run_()) {
    groups_->Fail(absl::AbortedError("the process group was destroyed with operations pending"));
    stage_.host->Release();
    KeepForever(stage_.slots_of_gpu);
    KeepForever(stage_.host->counters());
    if (stage_.up != nullptr) KeepForever(stage_.up);
  }
  stage_.host->Stop();
}

// What goes up has left its slot before the next chunk comes down to it. Nobody waits for ever even if all streams
// share a queue: what waits for a job comes after all that this job waits for on any rank.
absl::Status HostPipeline::Run(size_t chunks, void* stream, absl::FunctionRef<Chunk(size_t k, size_t slot)> make) {
  HostStage::UpStream* const apart = stage_.up.get();
  void* const up_stream = apart == nullptr ? stream : apart->stream.get();
  std::array<std::function<absl::Status(void*)>, HostStage::kSlots> up;
  std::array<uint32_t, HostStage::kSlots> number{};
  absl::Status status;
  // `to` goes on when `from` has come this far.
  const auto follow = [&](void* to, const OwnedEvent& event, void* from) {
    if (status.ok()) status = runtime_.Record(event.get(), from);
    if (status.ok()) status = runtime_.WaitEvent(to, event.get());
  };
  if (apart != nullptr) follow(up_stream, apart->begin, stream);
  for (size_t k = 0; status.ok() && k < chunks + HostStage::kSlots; ++k) {
    const size_t slot = k % HostStage::kSlots;
    if (up[slot] != nullptr) {
      status = stage_.host->Await(number[slot], up_stream);
      if (status.ok()) status = std::exchange(up[slot], nullptr)(up_stream);
      if (apart != nullptr) follow(stream, apart->through[slot], up_stream);
    }
    if (k >= chunks || !status.ok()) continue;
    Chunk chunk = make(k, slot);
    if (status = chunk.down(); !status.ok()) break;
    absl::StatusOr<uint32_t> job = stage_.host->HandOver(stream, std::move(chunk.job));
    if (!job.ok()) return job.status();
    number[slot] = *job;
    up[slot] = std::move(chunk.up);
  }
  return status;
}

absl::Status CopyChecked(DeviceRuntime& runtime, Buffers from, Buffers to, uint32_t* nonfinite, void* stream) {
  if (nonfinite == nullptr) return CopyPieces(runtime, from, to, stream);
  return runtime.Run({from[0].dtype, from[0].dtype, 1, nonfinite}, PairPieces(from, to), stream);
}

}  // namespace ddp
