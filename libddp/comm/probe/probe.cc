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

// The steps, on a thread of their own, which may be left behind.
class Prober {
 public:
  Prober(DeviceRuntime& runtime, const absl::StatusOr<nccl::Api>& api, const ProbeOptions& options)
      : runtime_(runtime), api_(api), options_(options), deadline_(absl::Now() + options.limit) {}
  // The communicator goes before the memory that its kernels may still work on.
  ~Prober() { Abort(); }

  // Ends the communicator, if there is one. NCCL may hang in that, too.
  void Abort() {
    nccl::Comm comm = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      comm = std::exchange(held_, nullptr);
    }
    if (comm == nullptr) return;
    const DeviceGuard guard(runtime_, options_.device);
    api_->CommAbort(comm);
  }

  bool Run() {
    std::unique_ptr<DeviceGuard> guard;
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
          if (!StartDevice(&guard)) return false;
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

  absl::Time deadline() const { return deadline_; }
  // Whether the collective that is under way has had its time, and the thread that to say so.
  bool Stuck() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return absl::Now() >= collective_end_ + kSayGrace;
  }
  // Nobody waits for the thread any more, which has ended or, as `waited` says, not. Returns the result.
  ProbeResult Abandon(const absl::Status& waited) {
    const std::lock_guard<std::mutex> lock(mutex_);
    abandoned_ = true;
    if (result_.state == ProbeState::kRunning) {
      const bool hangs = absl::IsDeadlineExceeded(waited);
      result_.Fail(hangs ? ProbeState::kHang : ProbeState::kStopped, hangs ? "" : std::string(waited.message()));
    }
    return result_;
  }

 private:
  template <typename Function>
  void Change(Function change) {
    ProbeResult copy;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (abandoned_) return;
      change(result_);
      copy = result_;
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
    const std::lock_guard<std::mutex> lock(mutex_);
    return abandoned_ || absl::Now() >= std::min(deadline_, collective_end_);
  }
  bool Hang() { return Fail(ProbeState::kHang, ""); }

  bool Load() {
    if (!Good(api_.status())) return false;
    const absl::StatusOr<nccl::Features> features = nccl::FeaturesOf(*api_);
    if (!Good(features.status())) return false;
    Change([&](ProbeResult& r) { r.nccl_version = features->version; });
    return true;
  }

  bool StartDevice(std::unique_ptr<DeviceGuard>* guard) {
    if (!Good(runtime_.Check(options_.device))) return false;
    *guard = std::make_unique<DeviceGuard>(runtime_, options_.device);
    if (!Good((*guard)->status())) return false;
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
      const std::lock_guard<std::mutex> lock(mutex_);
      held_ = comm_;
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
    const std::lock_guard<std::mutex> lock(mutex_);
    collective_end_ = end;
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
  std::vector<uint32_t> host_;  // outlives the stream's work, as the GPU's memory does
  std::shared_ptr<void> in_, out_;
  OwnedStream stream_;
  OwnedEvent begin_, end_;
  nccl::Comm comm_ = nullptr;

  // For the caller, too:
  std::mutex mutex_;
  ProbeResult result_;
  bool abandoned_ = false;
  absl::Time collective_end_ = absl::InfiniteFuture();  // of the collective that is under way
  nccl::Comm held_ = nullptr;                           // null again once it is aborted
};

}  // namespace

absl::Duration TimeOfCollective(absl::Duration limit) { return std::min(limit, std::max(limit / 4, kLeastCollective)); }

ProbeRun RunProbe(DeviceRuntime& runtime, const absl::StatusOr<nccl::Api>& api, const ProbeOptions& options) {
  auto prober = std::make_shared<Prober>(runtime, api, options);
  const auto interrupted = [&]() -> absl::Status {
    return prober->Stuck() ? absl::DeadlineExceededError("") : options.interrupted();
  };
  const absl::Status waited = RunUnder(prober->deadline() + kSayGrace, interrupted, "", [prober]() mutable {
    prober->Run();
    prober.reset();
    return absl::OkStatus();
  });
  ProbeRun run;
  run.result = prober->Abandon(waited);
  Prober* const begun = prober.get();
  run.connection = std::shared_ptr<void>(begun, [prober = std::move(prober)](void*) mutable {
    RunUnder(
        absl::Now() + kAbortGrace, [] { return absl::OkStatus(); }, "ncclCommAbort",
        [prober = std::move(prober)]() mutable {
          prober->Abort();  // which releases the thread, if that has one, too
          prober.reset();
          return absl::OkStatus();
        })
        .IgnoreError();
  });
  return run;
}

}  // namespace ddp
