// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/probe/probe.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libddp/comm/nccl/run_under.h"
#include "libddp/comm/probe/pattern.h"

namespace ddp {
namespace {

// What a thread that has seen its deadline gets to say so, and an abort to come through.
constexpr absl::Duration kSayGrace = absl::Milliseconds(100);
constexpr absl::Duration kAbortGrace = absl::Seconds(2);
// A loaded machine may hold up a collective for a moment.
constexpr absl::Duration kLeastCollective = absl::Seconds(2);

// What the caller and the thread that may be left behind share.
struct Shared {
  std::mutex mutex;
  ProbeResult result;
  bool abandoned = false;                              // nobody waits for the thread any more
  absl::Time collective_end = absl::InfiniteFuture();  // of the collective that is under way
  nccl::Comm comm = nullptr;
};

// Ends the communicator, unless somebody else has. NCCL may hang in that, too.
void AbortComm(DeviceRuntime& runtime, const nccl::Api& api, Device device, const std::shared_ptr<Shared>& shared) {
  nccl::Comm comm = nullptr;
  {
    const std::lock_guard<std::mutex> lock(shared->mutex);
    comm = std::exchange(shared->comm, nullptr);
  }
  if (comm == nullptr) return;
  RunUnder(
      absl::Now() + kAbortGrace, [] { return absl::OkStatus(); }, "ncclCommAbort",
      [&runtime, abort = api.CommAbort, comm, device] {
        const DeviceGuard guard(runtime, device);
        abort(comm);
        return absl::OkStatus();
      })
      .IgnoreError();
}

// The steps, on a thread of their own.
class Prober {
 public:
  Prober(DeviceRuntime& runtime, const absl::StatusOr<nccl::Api>& api, const ProbeOptions& options, absl::Time deadline,
         std::shared_ptr<Shared> shared)
      : runtime_(runtime), api_(api), options_(options), deadline_(deadline), shared_(std::move(shared)) {}

  void Run() {
    const bool passed = RunSteps();
    // The communicator goes before the memory that its kernels may still work on.
    if (!passed && api_.ok()) AbortComm(runtime_, *api_, options_.device, shared_);
  }

 private:
  bool RunSteps() {
    for (int step = 0; step < kProbeStepCount; ++step) {
      const ProbeStep& s = kProbeSteps[static_cast<size_t>(step)];
      if (s.timing_only && !options_.timing) continue;
      if (Expired()) return Hang();
      Change([&](ProbeResult& result) { result.step = step; });
      switch (s.kind) {
        case ProbeStep::Kind::kLibrary:
          if (!Load()) return false;
          break;
        case ProbeStep::Kind::kDevice:
          if (!StartDevice()) return false;
          break;
        case ProbeStep::Kind::kConnect:
          if (!Connect()) return false;
          break;
        default:
          if (!Exercise(s, step)) return false;
      }
    }
    Change([](ProbeResult& result) { result.state = ProbeState::kPassed; });
    return true;
  }

  template <typename Function>
  void Change(Function change) {
    ProbeResult copy;
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      if (shared_->abandoned) return;
      change(shared_->result);
      copy = shared_->result;
    }
    if (options_.progress) options_.progress(copy);
  }
  bool Fail(ProbeState how, const std::string& words, nccl::Result result = nccl::kSuccess) {
    Change([&](ProbeResult& r) {
      r.nccl_result = result;
      r.Fail(how, words);
    });
    return false;
  }
  bool Good(const absl::Status& status) {
    return status.ok() || Fail(ProbeState::kError, std::string(status.message()));
  }
  bool FailCall(absl::string_view call, nccl::Result result) {
    const char* const last = api_->GetLastError == nullptr ? nullptr : api_->GetLastError(comm_);
    return Fail(ProbeState::kError,
                absl::StrCat(call, ": ", api_->GetErrorString(result), last != nullptr && *last != 0 ? ": " : "",
                             last == nullptr ? "" : last),
                result);
  }
  bool Expired() {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    return shared_->abandoned || absl::Now() >= std::min(deadline_, shared_->collective_end);
  }
  bool Hang() { return Fail(ProbeState::kHang, ""); }

  bool Load() {
    if (!Good(api_.status())) return false;
    const absl::StatusOr<nccl::Features> features = nccl::FeaturesOf(*api_);
    if (!Good(features.status())) return false;
    Change([&](ProbeResult& r) { r.nccl_version = features->version; });
    return true;
  }

  bool StartDevice() {
    if (!Good(runtime_.Check(options_.device))) return false;
    guard_ = std::make_unique<DeviceGuard>(runtime_, options_.device);
    if (!Good(guard_->status())) return false;
    const size_t most = sizeof(uint32_t) * MostElements(options_.size, options_.timing);
    for (std::shared_ptr<void>* buffer : {&in_, &out_}) {
      absl::StatusOr<std::shared_ptr<void>> memory = runtime_.Allocate(options_.device, most);
      if (!Good(memory.status())) return false;
      *buffer = *std::move(memory);
    }
    absl::StatusOr<OwnedStream> stream = MakeStream(runtime_);
    absl::StatusOr<OwnedEvent> begin = MakeEvent(runtime_, true), end = MakeEvent(runtime_, true);
    if (!Good(stream.status()) || !Good(begin.status()) || !Good(end.status())) return false;
    stream_ = *std::move(stream);
    begin_ = *std::move(begin);
    end_ = *std::move(end);
    return true;
  }

  bool Connect() {
    nccl::UniqueId id = {};
    if (options_.rank == 0) {
      const nccl::Result result = api_->GetUniqueId(&id);
      if (result != nccl::kSuccess) return FailCall("ncclGetUniqueId", result);
    }
    if (!Good(options_.exchange_id(&id))) return false;
    nccl::Config config;
    config.blocking = 0;
    const nccl::Result result = api_->CommInitRankConfig(&comm_, options_.size, id, options_.rank, &config);
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      shared_->comm = comm_;
    }
    return Settle("ncclCommInitRankConfig", result);
  }

  // Waits until a nonblocking call has done its work on the host.
  bool Settle(absl::string_view call, nccl::Result result) {
    while (result == nccl::kInProgress) {
      if (Expired()) return Hang();
      const nccl::Result asked = api_->CommGetAsyncError(comm_, &result);
      if (asked != nccl::kSuccess) result = asked;
      if (result == nccl::kInProgress) absl::SleepFor(absl::Microseconds(20));
    }
    return result == nccl::kSuccess || FailCall(call, result);
  }

  bool Await(void* event) {
    while (true) {
      const absl::StatusOr<bool> finished = runtime_.Finished(event);
      if (!Good(finished.status())) return false;
      if (*finished) return true;
      nccl::Result error = nccl::kSuccess;
      const nccl::Result asked = api_->CommGetAsyncError(comm_, &error);
      if (asked != nccl::kSuccess) error = asked;
      if (error != nccl::kSuccess && error != nccl::kInProgress) return FailCall("an operation on the GPU", error);
      if (Expired()) return Hang();
      absl::SleepFor(absl::Microseconds(20));
    }
  }
  bool AwaitAll() { return Good(runtime_.Record(end_.get(), stream_.get())) && Await(end_.get()); }

  bool Call(const ProbeStep& s) {
    const size_t count = GivenElements(s, options_.size);
    if (s.kind == ProbeStep::Kind::kAllReduce) {
      return Settle("ncclAllReduce",
                    api_->AllReduce(in_.get(), out_.get(), count, nccl::kInt32, nccl::kSum, comm_, stream_.get()));
    }
    return Settle("ncclAllGather", api_->AllGather(in_.get(), out_.get(), count, nccl::kInt32, comm_, stream_.get()));
  }

  // A collective and what was recorded before, in their time.
  bool Finish(const ProbeStep& s) {
    SetCollectiveEnd(absl::Now() + TimeOfCollective(options_.limit));
    const bool done = Call(s) && AwaitAll();
    SetCollectiveEnd(absl::InfiniteFuture());
    return done;
  }
  void SetCollectiveEnd(absl::Time end) {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->collective_end = end;
  }

  // Every pattern once, checked; then a few times against the clock.
  bool Exercise(const ProbeStep& s, int step) {
    for (int pattern = 0; pattern < kPatterns; ++pattern) {
      if (!Check(s, pattern)) return false;
    }
    float best = 0;
    for (int i = 0; i < kTimedRuns; ++i) {
      if (!Good(runtime_.Record(begin_.get(), stream_.get())) || !Finish(s)) return false;
      const absl::StatusOr<double> us = runtime_.ElapsedUs(begin_.get(), end_.get());
      if (!Good(us.status())) return false;
      // Zero says that a step was not done.
      const float positive = std::max(static_cast<float>(*us), 0.001f);
      best = i == 0 ? positive : std::min(best, positive);
    }
    Change([&](ProbeResult& r) { r.micros[static_cast<size_t>(step)] = best; });
    return true;
  }

  bool Check(const ProbeStep& s, int pattern) {
    const size_t given = GivenElements(s, options_.size), results = ResultElements(s, options_.size);
    host_.resize(results);
    FillPattern(pattern, options_.rank, absl::MakeSpan(host_).first(given));
    // A copy to ordinary memory blocks until the stream is through: first the stream is watched.
    if (!Good(runtime_.Copy(in_.get(), host_.data(), given * sizeof(uint32_t), stream_.get())) ||
        !Good(runtime_.Zero(out_.get(), results * sizeof(uint32_t), stream_.get())) || !Finish(s) ||
        !Good(runtime_.Copy(host_.data(), out_.get(), results * sizeof(uint32_t), stream_.get())) || !AwaitAll()) {
      return false;
    }
    const std::string wrong = CheckPattern(s, pattern, options_.size, host_);
    return wrong.empty() || Fail(ProbeState::kWrongData, wrong);
  }

  DeviceRuntime& runtime_;
  const absl::StatusOr<nccl::Api> api_;
  const ProbeOptions options_;
  const absl::Time deadline_;
  const std::shared_ptr<Shared> shared_;
  std::unique_ptr<DeviceGuard> guard_;  // outlives what belongs to its device
  std::vector<uint32_t> host_;          // outlives the stream's work, as the GPU's memory does
  std::shared_ptr<void> in_, out_;
  OwnedStream stream_;
  OwnedEvent begin_, end_;
  nccl::Comm comm_ = nullptr;
};

}  // namespace

absl::Duration TimeOfCollective(absl::Duration limit) { return std::min(limit, std::max(limit / 4, kLeastCollective)); }

ProbeRun RunProbe(DeviceRuntime& runtime, const absl::StatusOr<nccl::Api>& api, const ProbeOptions& options) {
  const auto shared = std::make_shared<Shared>();
  const absl::Time deadline = absl::Now() + options.limit;
  const auto interrupted = [shared, asked = options.interrupted]() -> absl::Status {
    {
      const std::lock_guard<std::mutex> lock(shared->mutex);
      if (absl::Now() >= shared->collective_end + kSayGrace) return absl::DeadlineExceededError("");
    }
    return asked();
  };
  const absl::Status waited =
      RunUnder(deadline + kSayGrace, interrupted, "", [&runtime, api, options, deadline, shared] {
        Prober(runtime, api, options, deadline, shared).Run();
        return absl::OkStatus();
      });
  ProbeRun run;
  {
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->abandoned = true;
    if (shared->result.state == ProbeState::kRunning) {
      shared->result.Fail(absl::IsDeadlineExceeded(waited) ? ProbeState::kHang : ProbeState::kStopped,
                          absl::IsDeadlineExceeded(waited) ? "" : std::string(waited.message()));
    }
    run.result = shared->result;
  }
  if (run.result.state != ProbeState::kPassed) {
    if (api.ok()) AbortComm(runtime, *api, options.device, shared);
    return run;
  }
  run.connection = std::shared_ptr<void>(shared.get(), [&runtime, api = *api, device = options.device, shared](void*) {
    AbortComm(runtime, api, device, shared);
  });
  return run;
}

}  // namespace ddp
