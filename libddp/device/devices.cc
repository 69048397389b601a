// SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include "libddp/base/spin.h"
#include "libddp/device/device_runtime.h"

namespace ddp {
namespace {

std::atomic<DeviceRuntime*> in_place_of_cuda{nullptr};

}  // namespace

DeviceRuntime& Devices() {
  DeviceRuntime* const other = in_place_of_cuda.load(std::memory_order_acquire);
  return other == nullptr ? *CudaDevices() : *other;
}

ScopedDevices::ScopedDevices(DeviceRuntime& devices) { in_place_of_cuda.store(&devices, std::memory_order_release); }
ScopedDevices::~ScopedDevices() { in_place_of_cuda.store(nullptr, std::memory_order_release); }

absl::Status CheckStream(Device device, Stream stream) {
  if (!IsGpu(device) || stream.device == device || stream == kNoStream) return absl::OkStatus();
  if (IsGpu(stream.device)) {
    return absl::InvalidArgumentError(absl::StrCat("the stream is of GPU ", stream.device.index,
                                                   ", but the memory is on GPU ", device.index,
                                                   "; pass a stream of that GPU"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "no stream given for memory on GPU ", device.index,
      "; pass the stream on which this memory is written and read, or ddp::kNoStream if the host has waited for that"));
}

absl::Status Synchronize(Stream stream, absl::FunctionRef<bool()> give_up) {
  DeviceRuntime& gpus = Devices();
  const DeviceGuard guard(gpus, stream.device);
  if (!guard.status().ok()) return guard.status();
  const absl::StatusOr<OwnedEvent> event = MakeEvent(gpus);
  if (!event.ok()) return event.status();
  if (absl::Status s = gpus.Record(event->get(), stream.native); !s.ok()) return s;
  return WaitForEvent(*event, give_up);
}

absl::Status WaitForEvent(const OwnedEvent& event, absl::FunctionRef<bool()> give_up) {
  const DeviceGuard guard(Devices(), event.device());
  if (!guard.status().ok()) return guard.status();
  Backoff backoff(/*oversubscribed=*/false);
  while (true) {
    const absl::StatusOr<bool> finished = Devices().Finished(event.get());
    if (!finished.ok()) return finished.status();
    if (*finished) return absl::OkStatus();
    if (give_up()) return absl::DeadlineExceededError("the GPU's stream has not come free");
    backoff.Pause();
  }
}

}  // namespace ddp
