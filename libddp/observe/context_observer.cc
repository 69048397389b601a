#include "libddp/comm/context_observer.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "libddp/base/log.h"
#include "libddp/observe/flight_report.h"

namespace ddp {
namespace {

class ContextObserverImpl final : public ContextObserver {
 public:
  explicit ContextObserverImpl(ObserverOptions options) : options_(std::move(options)) {}

  Observer* listener() override { return options_.user; }
  uint64_t AddGroup() override { return groups_.fetch_add(1, std::memory_order_relaxed); }

  void OnIncident(const FlightIncident& incident) override {
    const FlightLog log = ReadFlightLog(incident);
    Log().log(incident.failure ? spdlog::level::err : spdlog::level::warn, "{}\n{}", std::string(incident.what),
              FlightText(log));
    if (options_.flight_recorder.empty()) return;
    std::ofstream file(options_.flight_recorder, std::ios::trunc);
    file << FlightJson(incident, log);
    file.close();
    if (file.fail()) {
      Log().error("rank {}: cannot write DDP_FLIGHT_RECORDER={}: {}", options_.rank, options_.flight_recorder,
                  std::strerror(errno));
    }
  }

 private:
  const ObserverOptions options_;
  std::atomic<uint64_t> groups_{0};
};

}  // namespace

std::unique_ptr<ContextObserver> CreateContextObserver(const ObserverOptions& options) {
  return std::make_unique<ContextObserverImpl>(options);
}

}  // namespace ddp
