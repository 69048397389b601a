// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/health/context_observer.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/observe/flight_report.h"
#include "libddp/observe/nvtx.h"
#include "libddp/observe/timeline.h"

namespace ddp {
namespace {

// How long the end of a Context waits for the other ranks' events.
constexpr absl::Duration kGatherPatience = absl::Seconds(30);

class ContextObserverImpl final : public ContextObserver, public Observer {
 public:
  explicit ContextObserverImpl(ObserverOptions options) : options_(std::move(options)) {
    if (!options_.trace.empty()) {
      timeline_.emplace(TimelineOptions{.rank = options_.rank, .path = options_.trace, .now_ns = nullptr});
      listeners_.push_back(&*timeline_);
    }
    if (nvtx_ != nullptr) listeners_.push_back(nvtx_.get());
    if (options_.user != nullptr) listeners_.push_back(options_.user);
  }

  Observer* listener() override {
    if (listeners_.empty()) return nullptr;
    return listeners_.size() == 1 ? listeners_[0] : this;
  }
  uint64_t AddGroup() override { return groups_.fetch_add(1, std::memory_order_relaxed); }

  // Observer, where there are several to be told:
  void OnOperation(const OperationEvent& event) noexcept override {
    for (Observer* listener : listeners_) listener->OnOperation(event);
  }
  void OnBucket(const BucketEvent& event) noexcept override {
    for (Observer* listener : listeners_) listener->OnBucket(event);
  }
  void OnScope(const ScopeEvent& event) noexcept override {
    for (Observer* listener : listeners_) listener->OnScope(event);
  }

  absl::Status Begin(ProcessGroup& world) override {
    return timeline_.has_value() ? timeline_->Begin(world) : absl::OkStatus();
  }
  void End(ProcessGroup& world) override {
    if (timeline_.has_value()) LogIfFailed(timeline_->End(world, kGatherPatience));
  }
  void OnGroupFailed() override {
    if (timeline_.has_value()) LogIfFailed(timeline_->WriteOwn());
  }

  void OnIncident(const FlightIncident& incident) override {
    const FlightLog log = ReadFlightLog(incident);
    LogAt(incident.failure ? LogLevel::kError : LogLevel::kWarn, incident.what, "\n", FlightText(log));
    if (options_.flight_recorder.empty()) return;
    const std::string path =
        incident.node < 0 ? options_.flight_recorder : absl::StrCat(options_.flight_recorder, ".node", incident.node);
    std::ofstream file(path, std::ios::trunc);
    file << FlightJson(incident, log);
    file.close();
    if (file.fail()) {
      LogError("rank ", options_.rank, ": cannot write DDP_FLIGHT_RECORDER=", path, ": ", std::strerror(errno));
    }
  }

 private:
  void LogIfFailed(const absl::Status& status) const {
    if (!status.ok()) LogError("rank ", options_.rank, ": ", status.message());
  }

  const ObserverOptions options_;
  std::optional<Timeline> timeline_;
  const std::unique_ptr<Observer> nvtx_ = CreateNvtxObserver();
  std::vector<Observer*> listeners_;
  std::atomic<uint64_t> groups_{0};
};

}  // namespace

std::unique_ptr<ContextObserver> CreateContextObserver(const ObserverOptions& options) {
  return std::make_unique<ContextObserverImpl>(options);
}

}  // namespace ddp
