// SPDX-License-Identifier: Apache-2.0
// The Work of an operation on GPUs.
#ifndef LIBDDP_COMM_GPU_DEVICE_WORK_H_
#define LIBDDP_COMM_GPU_DEVICE_WORK_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/base/spin.h"
#include "libddp/comm/gpu/device_engine.h"

namespace ddp {

// One operation. Kept by the engine when nobody refers to it, with its event.
class DeviceWork final : public internal::WorkState {
 public:
  enum State : int { kPending, kDone, kCaptured };

  bool Done() const override { return engine->Finished(const_cast<DeviceWork*>(this)); }

  absl::Status Wait(absl::Time deadline) override {
    if (state.load(std::memory_order_acquire) == kCaptured) {
      return absl::FailedPreconditionError(
          absl::StrCat(engine->name(), ": ", operation.Describe(),
                       " was captured into a CUDA graph and has not run: BlockStream it, then wait for the graph"));
    }
    const bool bounded = deadline != absl::InfiniteFuture();
    Backoff backoff(/*oversubscribed=*/false);
    while (!engine->Finished(this)) {
      if (bounded && absl::Now() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat(engine->name(), ": ", operation.Describe(), " is not done yet; it goes on"));
      }
      if (backoff.TimeToLook()) engine->options().progress->WhileWaiting();
      backoff.Pause();
    }
    return engine->Outcome(this);
  }

  absl::Status BlockStream(Stream stream) override {
    if (stream.device.kind == Device::Kind::kCpu) return Wait(absl::InfiniteFuture());
    // Nothing may be ordered after a failed operation as though it had succeeded.
    if (engine->failed_.load(std::memory_order_acquire) && state.load(std::memory_order_acquire) == kPending) {
      return engine->status();
    }
    if (state.load(std::memory_order_acquire) == kCaptured) return Named(engine->JoinCaptured(this, stream));
    // A null stream is the current device's.
    const DeviceGuard guard(engine->runtime(), stream.device);
    return Named(guard.status().ok() ? engine->runtime().WaitEvent(stream.native, event.get()) : guard.status());
  }

  void Ref() override { refs.fetch_add(1, std::memory_order_relaxed); }
  void Unref() override {
    if (refs.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    // The engine may end with this reference, but not before it has the work back.
    const std::shared_ptr<DeviceEngine> keep = std::move(engine);
    keep->Recycle(this);
  }

  absl::Status Named(const absl::Status& error) const {
    return error.ok() ? error : NameRank(engine->options().rank, operation.Describe(), error);
  }

  std::shared_ptr<DeviceEngine> engine;
  OwnedEvent event;
  DeviceOperation operation;
  uint64_t number = 0;     // among what is pending
  uint64_t sequence = 0;   // of the next collective, where this is none
  int64_t noticed_ns = 0;  // when it was first seen to be the oldest; guarded by the engine's mutex_
  std::atomic<int> state{kPending};
  std::atomic<int> refs{0};
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_DEVICE_WORK_H_
