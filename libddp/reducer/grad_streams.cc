// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/grad_streams.h"

#include <algorithm>
#include <utility>

#include "libddp/base/owner_process.h"

namespace ddp {

absl::Status GradStreams::Create(Device device) {
  const DeviceGuard guard(Devices(), device);
  if (!guard.status().ok()) return guard.status();
  absl::StatusOr<OwnedStream> stream = MakeStream(Devices());
  if (!stream.ok()) return stream.status();
  absl::StatusOr<OwnedEvent> event = MakeEvent(Devices());
  if (!event.ok()) return event.status();
  owned_ = *std::move(stream);
  event_ = *std::move(event);
  own_ = {device, owned_.get()};
  return absl::OkStatus();
}

Stream GradStreams::Use(Stream given) {
  if (!on_gpu()) return given;
  const Stream used = IsGpu(given.device) ? given : own_;
  if (used.native == own_.native) own_used_.store(true, std::memory_order_relaxed);
  void* first = first_.load(std::memory_order_relaxed);
  if (first == used.native) return used;
  if (first == this && first_.compare_exchange_strong(first, used.native, std::memory_order_relaxed)) return used;
  if (first == used.native) return used;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(others_.begin(), others_.end(), used.native) == others_.end()) others_.push_back(used.native);
  several_.store(true, std::memory_order_relaxed);
  return used;
}

absl::StatusOr<Stream> GradStreams::Follow(Stream given) {
  if (!on_gpu()) return given;
  if (!IsGpu(given.device)) return OwnBehind({});
  last_ = given;
  return given;
}

absl::StatusOr<Stream> GradStreams::OwnBehind(Stream given) {
  for (const Stream before : {last_, given}) {
    if (!IsGpu(before.device) || before.native == own_.native) continue;
    if (!IsGpu(given.device)) {
      const absl::StatusOr<bool> capturing = Capturing(before);
      if (!capturing.ok()) return capturing.status();
      if (*capturing) {
        return absl::FailedPreconditionError(
            "no stream was given, and the one that was given last is being captured into a CUDA graph: make this call "
            "before or after the capture, or give it the stream");
      }
    }
    if (absl::Status s = Order(before, own_); !s.ok()) return s;
  }
  return own_;
}

absl::StatusOr<Stream> GradStreams::Behind(bool own) {
  void* const first = first_.load(std::memory_order_relaxed);
  const bool several = several_.load(std::memory_order_relaxed);
  if (!own && !several && first != this) return Stream{own_.device, first};
  own_used_.store(true, std::memory_order_relaxed);
  if (absl::Status s = OrderAll(own_); !s.ok()) return s;
  return own_;
}

absl::Status GradStreams::OrderAll(Stream after) {
  std::vector<void*> all;
  if (several_.load(std::memory_order_relaxed)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all = others_;
  }
  if (void* const first = first_.load(std::memory_order_relaxed); first != this) all.push_back(first);
  for (void* const stream : all) {
    if (stream == after.native) continue;
    if (absl::Status s = Order({own_.device, stream}, after); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status GradStreams::EndUnreduced(Stream stream) {
  if (!on_gpu()) return absl::OkStatus();
  if (absl::Status s = OrderAll(stream); !s.ok()) return s;
  Reset();
  if (stream.native != own_.native) Use(stream);
  return Complete(stream);
}

absl::Status GradStreams::JoinOwn(Stream stream) {
  return own_used_.load(std::memory_order_relaxed) && stream.native != own_.native ? Order(own_, stream)
                                                                                   : absl::OkStatus();
}

absl::StatusOr<bool> GradStreams::Capturing(Stream stream) const {
  const DeviceGuard guard(Devices(), own_.device);
  return guard.status().ok() ? Devices().Capturing(stream.native) : guard.status();
}

void GradStreams::Forsake() {
  KeepForever(std::make_shared<OwnedStream>(std::move(owned_)));
  KeepForever(std::make_shared<OwnedEvent>(std::move(event_)));
}

absl::Status GradStreams::Complete(Stream stream) const {
  return on_gpu() && stream.native == own_.native ? Synchronize(own_) : absl::OkStatus();
}

void GradStreams::Reset() {
  own_used_.store(false, std::memory_order_relaxed);
  first_.store(this, std::memory_order_relaxed);
  if (!several_.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  others_.clear();
  several_.store(false, std::memory_order_relaxed);
}

absl::Status GradStreams::Order(Stream before, Stream after) {
  const DeviceGuard guard(Devices(), own_.device);
  if (!guard.status().ok()) return guard.status();
  if (absl::Status s = Devices().Record(event_.get(), before.native); !s.ok()) return s;
  return Devices().WaitEvent(after.native, event_.get());
}

}  // namespace ddp
