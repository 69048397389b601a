// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/probe/hierarchical_trial.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/probe/pattern.h"
#include "libddp/comm/staged/staged_group.h"

namespace ddp {
namespace {

// How long a copy behind an operation that is done may take.
constexpr absl::Duration kCopyPatience = absl::Seconds(30);

// One rank's part.
class GroupTrial {
 public:
  GroupTrial(ProcessGroup& group, DeviceRuntime& runtime)
      : group_(group), runtime_(runtime), guard_(runtime, group.device()) {}

  ProbeResult Run(bool timing) {
    absl::Status status = Start(timing);
    for (int step = 0; status.ok() && step < kProbeStepCount; ++step) {
      const ProbeStep& s = kProbeSteps[static_cast<size_t>(step)];
      if (s.kind < ProbeStep::Kind::kAllReduce || (s.timing_only && !timing)) continue;
      result_.step = step;
      for (int pattern = 0; status.ok() && pattern < kPatterns; ++pattern) status = Check(s, pattern);
      if (status.ok()) status = Measure(s);
    }
    if (status.ok()) {
      result_.state = ProbeState::kPassed;
      return result_;
    }
    result_.Fail(absl::IsDataLoss(status)           ? ProbeState::kWrongData
                 : absl::IsDeadlineExceeded(status) ? ProbeState::kHang
                                                    : ProbeState::kError,
                 status.message());
    group_.Abort(status);
    return result_;
  }

 private:
  absl::Status Start(bool timing) {
    result_.step = FirstStepOf(ProbeStep::Kind::kDevice);
    if (!guard_.status().ok()) return guard_.status();
    const size_t bytes = sizeof(uint32_t) * MostElements(group_.size(), timing);
    for (std::shared_ptr<void>* buffer : {&in_, &out_}) {
      absl::StatusOr<std::shared_ptr<void>> memory = runtime_.Allocate(group_.device(), bytes);
      if (!memory.ok()) return memory.status();
      *buffer = *std::move(memory);
    }
    absl::StatusOr<OwnedStream> stream = MakeStream(runtime_);
    if (!stream.ok()) return stream.status();
    absl::StatusOr<OwnedEvent> begin = MakeEvent(runtime_, true), end = MakeEvent(runtime_, true);
    if (!begin.ok()) return begin.status();
    if (!end.ok()) return end.status();
    stream_ = *std::move(stream);
    begin_ = *std::move(begin);
    end_ = *std::move(end);
    return absl::OkStatus();
  }

  Stream stream() const { return {group_.device(), stream_.get()}; }

  // The operation, with the stream behind it.
  absl::Status Call(const ProbeStep& s) {
    const Device device = group_.device();
    const Buffer in{in_.get(), GivenElements(s, group_.size()), DType::kInt32, device};
    const Buffer out{out_.get(), ResultElements(s, group_.size()), DType::kInt32, device};
    Work work = s.kind == ProbeStep::Kind::kAllReduce ? group_.AllReduce(in, out, Sum(), stream())
                                                      : group_.AllGather(in, out, stream());
    if (absl::Status status = work.BlockStream(stream()); !status.ok()) return status;
    if (absl::Status status = runtime_.Record(end_.get(), stream_.get()); !status.ok()) return status;
    if (absl::Status status = work.Wait(); !status.ok()) return status;
    return Await();
  }

  // What has been recorded is behind an operation that is done.
  absl::Status Await() {
    for (const absl::Time until = absl::Now() + kCopyPatience; absl::Now() < until;
         absl::SleepFor(absl::Microseconds(20))) {
      const absl::StatusOr<bool> finished = runtime_.Finished(end_.get());
      if (!finished.ok()) return finished.status();
      if (*finished) return absl::OkStatus();
    }
    return absl::DeadlineExceededError("a copy does not end");
  }

  absl::Status Check(const ProbeStep& s, int pattern) {
    const size_t given = GivenElements(s, group_.size()), results = ResultElements(s, group_.size());
    host_.resize(results);
    FillPattern(pattern, group_.rank(), absl::MakeSpan(host_).first(given));
    absl::Status status = runtime_.Copy(in_.get(), host_.data(), given * sizeof(uint32_t), stream_.get());
    status.Update(runtime_.Zero(out_.get(), results * sizeof(uint32_t), stream_.get()));
    if (!status.ok()) return status;
    if (status = Call(s); !status.ok()) return status;
    status = runtime_.Copy(host_.data(), out_.get(), results * sizeof(uint32_t), stream_.get());
    status.Update(runtime_.Record(end_.get(), stream_.get()));
    if (status.ok()) status = Await();
    if (!status.ok()) return status;
    const std::string wrong = CheckPattern(s, pattern, group_.size(), host_);
    return wrong.empty() ? absl::OkStatus() : absl::DataLossError(wrong);
  }

  absl::Status Measure(const ProbeStep& s) {
    float best = 0;
    for (int i = 0; i < kTimedRuns; ++i) {
      if (absl::Status status = runtime_.Record(begin_.get(), stream_.get()); !status.ok()) return status;
      if (absl::Status status = Call(s); !status.ok()) return status;
      const absl::StatusOr<double> us = runtime_.ElapsedUs(begin_.get(), end_.get());
      if (!us.ok()) return us.status();
      // Zero says that a step was not done.
      const float positive = std::max(static_cast<float>(*us), 0.001f);
      best = i == 0 ? positive : std::min(best, positive);
    }
    result_.micros[static_cast<size_t>(result_.step)] = best;
    return absl::OkStatus();
  }

  ProcessGroup& group_;
  DeviceRuntime& runtime_;
  const DeviceGuard guard_;     // outlives what belongs to its device
  std::vector<uint32_t> host_;  // outlives the stream's work, as the GPU's memory does
  std::shared_ptr<void> in_, out_;
  OwnedStream stream_;
  OwnedEvent begin_, end_;
  ProbeResult result_;
};

}  // namespace

ProbeResult TryGroup(ProcessGroup& group, DeviceRuntime& runtime, bool timing) {
  return GroupTrial(group, runtime).Run(timing);
}

absl::StatusOr<std::vector<ProbeResult>> TryHierarchical(ProcessGroup& control, DeviceGroupOptions options,
                                                         const AttemptTime& time, bool timing) {
  options.timeout = time.time;
  absl::StatusOr<std::unique_ptr<ProcessGroup>> own = control.Split(0, control.rank());
  if (!own.ok()) return own.status();
  absl::StatusOr<std::unique_ptr<ProcessGroup>> group = CreateStagedGroup(*std::move(own), options);
  ProbeResult mine;
  mine.step = FirstStepOf(ProbeStep::Kind::kConnect);
  if (group.ok()) {
    mine = TryGroup(**group, *options.runtime, timing);
  } else {
    mine.Fail(absl::IsDeadlineExceeded(group.status()) ? ProbeState::kHang : ProbeState::kError,
              group.status().message());
  }
  if (mine.state == ProbeState::kHang) mine.short_ms = time.short_ms();
  return Exchange(control, mine);  // before this rank lets its group go
}

}  // namespace ddp
