// How the engine tells of stalls and failures.
#include <time.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libddp/comm/host/engine.h"

namespace ddp {

std::string Operation::Describe() const {
  return absl::StrCat("operation ", sequence, ", ", called().Describe(called_count()),
                      bucket < 0 ? "" : absl::StrCat(", bucket ", bucket));
}

Operation* Engine::OldestPending() const {
  const auto pending = [](const Operation* operation) { return !operation->Done(); };
  const auto found = std::find_if(queue_.begin(), queue_.end(), pending);
  return found == queue_.end() ? nullptr : *found;
}

// --- incidents ------------------------------------------------------------------------------------------------------

FlightIncident Engine::Incident(bool failure, absl::string_view what) const {
  FlightIncident incident{.what = what, .failure = failure, .rank = options_.rank, .rings = {}, .dead = {}};
  for (int r = 0; r < options_.size; ++r) incident.rings.push_back(&control_.flight(r));
  incident.dead = options_.peers.Dead();
  return incident;
}

// A stall is told once, by the lowest rank that waits: the others give it time to.
void Engine::TellStall(const Operation& oldest, int64_t waited_ns) {
  const int64_t patience = absl::ToInt64Nanoseconds(options_.stall_warning);
  if (options_.observer == nullptr || patience <= 0 || waited_ns < patience) return;
  int before = 0;
  for (int r = 0; r < options_.rank; ++r) before += HasAnnounced(oldest, r);
  if (waited_ns - before * kTellPatienceNs < patience) return;
  std::atomic<uint64_t>& told = control_.desk().stalls;
  uint64_t until = told.load(std::memory_order_relaxed);
  // What is in the queue behind it waits for the same.
  if (until > oldest.sequence || !told.compare_exchange_strong(until, first_sequence_ + queue_.size())) return;
  options_.observer->OnIncident(Incident(
      false,
      absl::StrFormat("rank %d: %s, has been waiting for %.1f s: %s; it goes on waiting up to the time-out of %s",
                      options_.rank, oldest.Describe(), static_cast<double>(waited_ns) / 1e9,
                      FindLaggards(oldest, waited_ns).text, absl::FormatDuration(options_.timeout))));
}

// Nobody is let go before the report is out: a launcher may kill the whole job as soon as one rank has ended.
void Engine::FailAndTell(const absl::Status& why) {
  if (!failure_.ok()) return;
  const bool first = !control_.failure().happened();
  if (first && options_.observer != nullptr) {
    const std::vector<int> dead = options_.peers.Dead();
    const Operation* const oldest = OldestPending();
    const auto waits = [&](int r) {
      return oldest != nullptr && HasAnnounced(*oldest, r) && std::find(dead.begin(), dead.end(), r) == dead.end();
    };
    int teller = 0;
    while (teller < options_.rank && !waits(teller)) ++teller;
    if (teller != options_.rank) {
      FlightDesk& desk = control_.desk();
      desk.teller.store(static_cast<uint32_t>(teller) + 1, std::memory_order_release);
      const int64_t until = NowNs() + kTellPatienceNs;
      while (desk.failure.load(std::memory_order_acquire) != FlightDesk::kTold && NowNs() < until) {
        const timespec nap{0, 100'000};
        nanosleep(&nap, nullptr);
      }
    }
    TellFailure(why.message());
  }
  FailLocked(why);
}

void Engine::TellFailure(absl::string_view what) {
  FlightDesk& desk = control_.desk();
  uint32_t nobody = FlightDesk::kNobody;
  if (!desk.failure.compare_exchange_strong(nobody, FlightDesk::kTelling)) return;
  options_.observer->OnIncident(Incident(true, what));
  desk.failure.store(FlightDesk::kTold, std::memory_order_release);
}

}  // namespace ddp
