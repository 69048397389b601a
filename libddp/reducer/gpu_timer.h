// SPDX-License-Identifier: Apache-2.0
// When the buckets of a step on a GPU were reduced, by the GPU's clock.
#ifndef LIBDDP_REDUCER_GPU_TIMER_H_
#define LIBDDP_REDUCER_GPU_TIMER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "libddp/device/device_runtime.h"
#include "libddp/reducer/statistics.h"

namespace ddp {

// Measures one step at a time by events, which no stream and no host waits for: what they say is read later, when they
// have happened. What cannot be measured (an event that cannot be made) is left out. A step that is captured into a
// CUDA graph needs a timer of its own, whose events every replay records anew.
// Not thread-safe.
class GpuTimer {
 public:
  // A step of which `stream` is the first stream. Does nothing while an earlier one has not been read.
  void Begin(int64_t step, int64_t begin_ns, std::shared_ptr<const BucketNames> names, Stream stream);
  // A step that is captured on `stream`, once.
  void BeginCaptured(std::shared_ptr<const BucketNames> names, Stream stream);
  // Bucket b's operations begin behind what `behind` holds.
  void Launched(size_t b, Stream behind);
  // `work` is bucket b's last; its end is marked no earlier than this call. An error only for a captured step: the
  // capture is then broken.
  absl::Status Done(size_t b, const BucketTimes& times, Work work);
  // Around what makes the program's stream wait for the reductions.
  void BeginWait(Stream stream) { Mark(kWaitBegin, stream); }
  absl::Status EndWait(Stream stream);  // the same
  bool captured() const { return captured_; }
  // Forgets a step that has not ended.
  void Drop() {
    if (state_ == State::kMeasuring) state_ = State::kIdle;
  }

  // The step that was measured last, once, when all of it has happened.
  std::optional<MeasuredStep> Read();
  // The last replay of the captured step. Nothing if none has ended, or if one is running.
  std::optional<MeasuredStep> ReadReplay();

 private:
  enum class State : uint8_t { kIdle, kMeasuring, kEnded };
  // Events: of the step, then two for each bucket.
  static constexpr size_t kBegin = 0, kWaitBegin = 1, kWaitEnd = 2, kBuckets = 3;

  bool Prepare(Stream stream);
  void Mark(size_t event, Stream stream);
  absl::Status JoinCapture(Stream stream);
  absl::StatusOr<MeasuredStep> TryRead();

  State state_ = State::kIdle;
  MeasuredStep step_;
  bool captured_ = false;
  bool joined_ = false;  // stream_ has become part of the capture
  Device device_;
  OwnedStream stream_;  // waits for works, that nothing else has to
  std::vector<OwnedEvent> events_;
  OwnedEvent join_;  // of a capture
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_GPU_TIMER_H_
