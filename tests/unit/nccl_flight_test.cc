// SPDX-License-Identifier: Apache-2.0
// What observers, the stall warning and the flight recorder are told of operations on GPUs.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "ddp/observer.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/health/context_observer.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

using State = OperationEvent::State;

// An incident, with what the rings held when it was told.
struct Told {
  std::string what;
  bool failure;
  int rank;
  std::vector<int> names;
  std::vector<std::vector<FlightRecord>> rings;
};

class Recorder final : public ContextObserver, public Observer {
 public:
  Observer* listener() override { return this; }
  absl::Status Begin(ProcessGroup&) override { return absl::OkStatus(); }
  void End(ProcessGroup&) override {}
  void OnGroupFailed() override {}
  uint64_t AddGroup() override { return 7; }
  void OnIncident(const FlightIncident& incident) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    Told told{std::string(incident.what), incident.failure, incident.rank, incident.names, {}};
    for (const FlightRing* ring : incident.rings) told.rings.push_back(ring->Read());
    incidents_.push_back(std::move(told));
  }
  void OnOperation(const OperationEvent& event) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(event);
  }
  void OnBucket(const BucketEvent&) noexcept override {}
  void OnScope(const ScopeEvent&) noexcept override {}

  std::vector<OperationEvent> events() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return events_;
  }
  std::vector<Told> incidents() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return incidents_;
  }

 private:
  std::mutex mutex_;
  std::vector<OperationEvent> events_;
  std::vector<Told> incidents_;
};

// Runs `body` with groups that tell one Recorder for each rank.
void Observed(Job& job, absl::Duration stall_warning, std::vector<Recorder>& recorders,
              const std::function<void(Rank&, ProcessGroup&)>& body) {
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    NcclGroupOptions options = rank.Options();
    options.stall_warning = stall_warning;
    options.observer = &recorders[static_cast<size_t>(rank.rank)];
    const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateGpuGroup(std::move(control), options));
    try {
      body(rank, *group);
    } catch (const std::exception& e) {
      group->Abort(absl::InternalError(e.what()));
      throw;
    }
  });
}

TEST_CASE("observers are told when an operation on GPUs is called, and when it has ended") {
  Job job(2);
  std::vector<Recorder> recorders(2);
  Observed(job, absl::ZeroDuration(), recorders, [](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kFloat32, 10, false);
    RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(1), {.bucket = 3}, kNoStream).Wait());
    RANK_CHECK_OK(group.Broadcast(a.Cut(2), 1, kNoStream).Wait());
  });
  for (Recorder& recorder : recorders) {
    const std::vector<OperationEvent> events = recorder.events();
    REQUIRE(events.size() == 4);
    for (size_t i = 0; i < 4; ++i) {
      const OperationEvent& e = events[i];
      CHECK(e.state == (i % 2 == 0 ? State::kCalled : State::kDone));
      CHECK(e.kind == (i < 2 ? "all_reduce" : "broadcast"));
      CHECK(e.sequence == i / 2);
      CHECK(e.group == 7);
      CHECK(e.count == 10);
      CHECK(e.bucket == (i < 2 ? 3 : -1));
      CHECK(e.called_ns > 0);
      CHECK((i % 2 == 0 ? e.ended_ns == 0 : e.ended_ns >= e.called_ns));
    }
    CHECK(recorder.incidents().empty());
  }
}

// Of three ranks the second one does not come: what is told of it where the warning is due some time before the
// time-out.
std::vector<Told> ToldOfAMissingRank(absl::Duration timeout, std::vector<Recorder>& recorders) {
  Job job(3);
  job.timeout = timeout;
  std::barrier all_are_done(3);
  // The warning comes later than the ranks that come are apart on a busy machine.
  Observed(job, 3 * timeout / 8, recorders, [&](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kFloat32, 10, false);
    RANK_CHECK_OK(group.Broadcast(a.Cut(1), 0, kNoStream).Wait());
    all_are_done.arrive_and_wait();
    if (rank.rank == 1) {
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    RANK_CHECK_STATUS(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait(), absl::StatusCode::kDeadlineExceeded,
                      "rank 1");
  });
  std::vector<Told> told;
  for (Recorder& recorder : recorders) {
    for (Told& one : recorder.incidents()) told.push_back(std::move(one));
  }
  return told;
}

TEST_CASE("a rank that does not come to an operation on GPUs is warned of, and in the end reported, once") {
  std::vector<Recorder> recorders;
  const auto run = [&](absl::Duration timeout) {
    recorders = std::vector<Recorder>(3);
    return ToldOfAMissingRank(timeout, recorders);
  };
  const std::vector<Told> told = GivenTime(TimeFor(absl::Seconds(4)), run, [](const std::vector<Told>& all) {
    return all.size() == 2 && std::all_of(all.begin(), all.end(), [](const Told& one) {
             return absl::StrContains(one.what, "did not arrive: rank 1");
           });
  });
  const auto failures = [](const Told& one) { return one.failure; };
  CHECK(std::count_if(told.begin(), told.end(), failures) == 1);
  REQUIRE(told.size() == 2);
  for (const Told& one : told) {
    INFO(one.what);
    CHECK(absl::StrContains(one.what, "operation 1, all_reduce(sum, float32, 10 elements)"));
    CHECK(absl::StrContains(one.what, "did not arrive: rank 1"));
    if (!one.failure) CHECK(one.rank != 1);
    CHECK(one.names == std::vector<int>{0, 1, 2});
    REQUIRE(one.rings.size() == 3);
    for (const size_t r : {0, 1, 2}) {
      const std::vector<FlightRecord>& ring = one.rings[r];
      REQUIRE(ring.size() == (r == 1 ? 1 : 2));
      CHECK(ring[0].state == FlightState::kDone);
      CHECK(OperationKey::Unpack(ring[0].what).kind == OperationKey::Kind::kBroadcast);
      if (r != 1) CHECK(ring[1].state == FlightState::kAnnounced);
    }
  }
  // Whoever waited is told that it failed.
  for (const size_t r : {0, 2}) {
    const std::vector<OperationEvent> events = recorders[r].events();
    REQUIRE(events.size() == 4);
    CHECK(events.back().state == State::kFailed);
    CHECK(events.back().sequence == 1);
  }
}

TEST_CASE("what the program aborts is not reported") {
  Job job(2);
  std::vector<Recorder> recorders(2);
  std::barrier all_are_done(2);
  Observed(job, absl::ZeroDuration(), recorders, [&](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kFloat32, 10, false);
    RANK_CHECK_OK(group.Broadcast(a.Cut(1), 0, kNoStream).Wait());
    all_are_done.arrive_and_wait();
    group.Abort(absl::InternalError("enough"));
  });
  for (Recorder& recorder : recorders) {
    CHECK(recorder.incidents().empty());
    CHECK(recorder.events().size() == 2);
  }
}

}  // namespace
}  // namespace ddp::testing::simulated
