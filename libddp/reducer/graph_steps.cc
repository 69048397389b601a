// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/graph_steps.h"

#include <atomic>
#include <utility>

#include "libddp/base/owner_process.h"

namespace ddp {

absl::Status GraphSteps::Create(Device device) {
  const DeviceGuard guard(Devices(), device);
  if (!guard.status().ok()) return guard.status();
  absl::StatusOr<std::shared_ptr<void>> counter = Devices().AllocatePinned(sizeof(uint32_t));
  if (!counter.ok()) return counter.status();
  counter_ = *std::move(counter);
  return absl::OkStatus();
}

GpuTimer* GraphSteps::Begin(bool measure, std::shared_ptr<const BucketNames> names, Stream stream) {
  captured_ = true;
  if (!measure) return nullptr;
  GpuTimer* const timer = timers_.emplace_back(std::make_unique<GpuTimer>()).get();
  timer->BeginCaptured(std::move(names), stream);
  return timer;
}

int64_t GraphSteps::replays() const {
  return captured_ ? std::atomic_ref<uint32_t>(*counter()).load(std::memory_order_acquire) : 0;
}

// A replay that begins meanwhile shows: its first event is then later than the last replay's others, or it has ended.
std::optional<MeasuredStep> GraphSteps::Read() {
  const int64_t before = replays();
  if (timers_.empty() || before == read_) return std::nullopt;
  std::optional<MeasuredStep> step;  // of the last graph that has run
  for (auto timer = timers_.rbegin(); timer != timers_.rend() && !step.has_value(); ++timer)
    step = (*timer)->ReadReplay();
  if (!step.has_value() || replays() != before) return std::nullopt;
  read_ = before;
  return step;
}

void GraphSteps::Forsake() {
  if (!captured_) return;
  KeepForever(counter_);
  KeepForever(std::make_shared<std::vector<std::unique_ptr<GpuTimer>>>(std::move(timers_)));
}

}  // namespace ddp
