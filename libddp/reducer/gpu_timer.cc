#include "libddp/reducer/gpu_timer.h"

#include <algorithm>
#include <utility>

namespace ddp {

void GpuTimer::Begin(int64_t step, int64_t begin_ns, std::shared_ptr<const BucketNames> names, Stream stream) {
  if (state_ != State::kIdle) return;
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok() || Devices().Capturing(stream.native).value_or(true)) return;
  if (stream_.get() == nullptr) {
    absl::StatusOr<OwnedStream> made = MakeStream(Devices());
    if (!made.ok()) return;
    stream_ = *std::move(made);
  }
  step_ = {step, begin_ns, 0, {}, std::move(names)};
  device_ = stream.device;
  state_ = State::kMeasuring;
  Mark(kBegin, stream);
}

void GpuTimer::Mark(size_t event, Stream stream) {
  if (state_ != State::kMeasuring) return;
  const DeviceGuard guard(Devices(), device_);
  while (events_.size() <= event) {
    absl::StatusOr<OwnedEvent> made = MakeEvent(Devices(), /*timed=*/true);
    if (!made.ok()) return Drop();
    events_.push_back(*std::move(made));
  }
  if (!Devices().Record(events_[event].get(), stream.native).ok()) Drop();
}

void GpuTimer::Launched(size_t b, Stream behind) { Mark(kBuckets + 2 * b, behind); }

void GpuTimer::Done(size_t b, const BucketTimes& times, Work work) {
  if (state_ != State::kMeasuring) return;
  step_.buckets.resize(std::max(step_.buckets.size(), b + 1));
  step_.buckets[b] = times;
  const Stream own{device_, stream_.get()};
  if (!work.BlockStream(own).ok()) return Drop();
  Mark(kBuckets + 2 * b + 1, own);
}

void GpuTimer::EndWait(Stream stream) {
  Mark(kWaitEnd, stream);
  if (state_ == State::kMeasuring) state_ = State::kEnded;
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

// Unavailable: not yet.
absl::StatusOr<MeasuredStep> GpuTimer::TryRead() {
  const size_t used = kBuckets + 2 * step_.buckets.size();
  for (size_t event = used; event-- > 0;) {
    const absl::StatusOr<bool> finished = Devices().Finished(events_[event].get());
    if (!finished.ok()) return absl::InternalError("");
    if (!*finished) return absl::UnavailableError("");
  }
  const auto between = [&](size_t from, size_t to) -> int64_t {
    return static_cast<int64_t>(1e3 * Devices().ElapsedUs(events_[from].get(), events_[to].get()).value_or(0));
  };
  step_.exposed_ns = between(kWaitBegin, kWaitEnd);
  for (size_t b = 0; b < step_.buckets.size(); ++b) {
    BucketTimes& times = step_.buckets[b];
    times.ready_ns = times.launched_ns = between(kBegin, kBuckets + 2 * b);
    times.done_ns = between(kBegin, kBuckets + 2 * b + 1);
  }
  return step_;
}

}  // namespace ddp
