// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/gpu_timer.h"

#include <algorithm>
#include <utility>

namespace ddp {

void GpuTimer::Begin(int64_t step, int64_t begin_ns, std::shared_ptr<const BucketNames> names, Stream stream) {
  if (state_ != State::kIdle) return;
  if (!Prepare(stream)) return;
  step_ = {step, begin_ns, 0, {}, std::move(names)};
  state_ = State::kMeasuring;
  Mark(kBegin, stream);
}

void GpuTimer::BeginCaptured(std::shared_ptr<const BucketNames> names, Stream stream) {
  if (!Prepare(stream)) return;
  captured_ = true;
  step_.names = std::move(names);
  state_ = State::kMeasuring;
  Mark(kBegin, stream);
}

bool GpuTimer::Prepare(Stream stream) {
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok()) return false;
  if (stream_.get() == nullptr) {
    absl::StatusOr<OwnedStream> made = MakeStream(Devices());
    if (!made.ok()) return false;
    stream_ = *std::move(made);
  }
  device_ = stream.device;
  return true;
}

void GpuTimer::Mark(size_t event, Stream stream) {
  if (state_ != State::kMeasuring) return;
  const DeviceGuard guard(Devices(), device_);
  while (events_.size() <= event) {
    absl::StatusOr<OwnedEvent> made = MakeEvent(Devices(), /*timed=*/true);
    if (!made.ok()) return Drop();
    events_.push_back(*std::move(made));
  }
  void* const made = events_[event].get();
  const absl::Status recorded =
      captured_ ? Devices().RecordEachReplay(made, stream.native) : Devices().Record(made, stream.native);
  if (!recorded.ok()) Drop();
}

void GpuTimer::Launched(size_t b, Stream behind) { Mark(kBuckets + 2 * b, behind); }

absl::Status GpuTimer::Done(size_t b, const BucketTimes& times, Work work) {
  if (state_ != State::kMeasuring) return absl::OkStatus();
  step_.buckets.resize(std::max(step_.buckets.size(), b + 1));
  step_.buckets[b] = times;
  const Stream own{device_, stream_.get()};
  if (absl::Status s = work.BlockStream(own); !s.ok()) {
    Drop();
    return captured_ ? s : absl::OkStatus();
  }
  joined_ = captured_;
  Mark(kBuckets + 2 * b + 1, own);
  return absl::OkStatus();
}

absl::Status GpuTimer::EndWait(Stream stream) {
  Mark(kWaitEnd, stream);
  if (state_ == State::kMeasuring) state_ = State::kEnded;
  return joined_ ? JoinCapture(stream) : absl::OkStatus();
}

// A capture ends with one stream only.
absl::Status GpuTimer::JoinCapture(Stream stream) {
  const DeviceGuard guard(Devices(), device_);
  absl::StatusOr<OwnedEvent> made = MakeEvent(Devices());
  if (!made.ok()) return made.status();
  join_ = *std::move(made);
  if (absl::Status s = Devices().Record(join_.get(), stream_.get()); !s.ok()) return s;
  return Devices().WaitEvent(stream.native, join_.get());
}

std::optional<MeasuredStep> GpuTimer::Read() {
  if (state_ != State::kEnded) return std::nullopt;
  const DeviceGuard guard(Devices(), device_);
  absl::StatusOr<MeasuredStep> step = TryRead();
  if (absl::IsUnavailable(step.status())) return std::nullopt;
  state_ = State::kIdle;
  if (!step.ok()) return std::nullopt;
  return *std::move(step);
}

std::optional<MeasuredStep> GpuTimer::ReadReplay() {
  if (state_ != State::kEnded) return std::nullopt;
  const DeviceGuard guard(Devices(), device_);
  const absl::StatusOr<MeasuredStep> step = TryRead();
  if (!step.ok() || step->exposed_ns < 0) return std::nullopt;
  for (const BucketTimes& times : step->buckets) {
    if (times.launched_ns < 0 || times.done_ns < 0) return std::nullopt;
  }
  return *step;
}

// Unavailable: not yet.
absl::StatusOr<MeasuredStep> GpuTimer::TryRead() {
  const size_t used = kBuckets + 2 * step_.buckets.size();
  for (size_t event = used; event-- > 0;) {
    const absl::StatusOr<bool> finished = Devices().Finished(events_[event].get());
    if (!finished.ok()) return absl::InternalError("");
    if (!*finished) return absl::UnavailableError("");
  }
  absl::Status status;  // the events of a graph that has never run have no time
  const auto between = [&](size_t from, size_t to) -> int64_t {
    const absl::StatusOr<double> us = Devices().ElapsedUs(events_[from].get(), events_[to].get());
    status.Update(us.status());
    return static_cast<int64_t>(1e3 * us.value_or(0));
  };
  step_.exposed_ns = between(kWaitBegin, kWaitEnd);
  for (size_t b = 0; b < step_.buckets.size(); ++b) {
    BucketTimes& times = step_.buckets[b];
    times.ready_ns = times.launched_ns = between(kBegin, kBuckets + 2 * b);
    times.done_ns = between(kBegin, kBuckets + 2 * b + 1);
  }
  if (!status.ok()) return status;
  return step_;
}

}  // namespace ddp
