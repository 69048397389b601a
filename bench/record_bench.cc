// SPDX-License-Identifier: Apache-2.0
// What the records that are always on cost a step of DistributedDataParallel: the flight recorder's notes of every
// operation, and the statistics of every bucket.
//
//   record_bench [buckets=2] [step_us=5000]
//
// Does to the same data structures what a reduced step of so many buckets does, thousands of times, and gives the time
// of a step's records: once with everything in the caches, and once with caches that hold other data, as after a
// backward pass. Then its share of a step of step_us.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "bench/arguments.h"
#include "libddp/base/spin.h"
#include "libddp/comm/health/flight_ring.h"
#include "libddp/reducer/statistics.h"

namespace {

using ddp::FlightState;

constexpr int kSteps = 2000;
constexpr size_t kOtherData = size_t{8} << 20;  // more than the caches next to a core

// The records of one step, by the functions that the library calls, as often and in the same order.
class Step {
 public:
  explicit Step(size_t buckets) : times_(buckets) {}

  void Record() {
    const int64_t begin = ddp::NowNs();
    for (ddp::BucketTimes& t : times_) {
      t.ready_ns = ddp::NowNs() - begin;
      t.launched_ns = ddp::NowNs() - begin;
      ring_->Queue(sequence_, 0, 1 << 20, 0, ddp::CoarseNowNs());
      for (const FlightState state : {FlightState::kAnnounced, FlightState::kReady, FlightState::kDone}) {
        ring_->Enter(sequence_, state, ddp::CoarseNowNs());
      }
      ++sequence_;
      t.done_ns = ddp::NowNs() - begin;
    }
    const int64_t entered = ddp::NowNs();
    statistics_.CountStep();
    statistics_.Record(std::vector<ddp::BucketTimes>(times_), ddp::NowNs() - entered);
  }
  int64_t steps() const { return statistics_.steps(); }

 private:
  std::unique_ptr<ddp::FlightRing> ring_ = std::make_unique<ddp::FlightRing>();
  std::vector<ddp::BucketTimes> times_;
  ddp::Statistics statistics_;
  uint64_t sequence_ = 0;
};

// Median, in ns, of a step's records; the clock that is read for that costs about 25 of them.
int64_t Time(Step& step, std::vector<char>* other) {
  std::vector<int64_t> ns(kSteps);
  for (int64_t& time : ns) {
    if (other != nullptr) {
      for (size_t i = 0; i < other->size(); i += 64) ++(*other)[i];
    }
    const int64_t begin = ddp::NowNs();
    step.Record();
    time = ddp::NowNs() - begin;
  }
  std::nth_element(ns.begin(), ns.begin() + kSteps / 2, ns.end());
  return ns[kSteps / 2];
}

}  // namespace

int main(int argc, char** argv) {
  int64_t buckets = 2, step_us = 5000;
  const char* const what = "Times what libddp records in every step: the flight recorder's notes and the statistics.";
  const char* const usage =
      "  record_bench [BUCKETS [STEP_US]]\n\n"
      "  BUCKETS  buckets of a step, 1 to 256 (default 2)\n"
      "  STEP_US  microseconds of the step that the records are compared with (default 5000)";
  if (const std::optional<int> code = bench::ReadNumbers(argc, argv, what, usage, {{&buckets, 1, 256}, {&step_us}})) {
    return *code;
  }
  Step step(static_cast<size_t>(buckets));
  std::vector<char> other(kOtherData);
  const int64_t hot = Time(step, nullptr), cold = Time(step, &other);
  std::printf(
      "records of a step of %ld buckets, %lld steps: %lld ns in the caches, %lld ns (%.4f %% of %ld us) outside\n",
      buckets, static_cast<long long>(step.steps()), static_cast<long long>(hot), static_cast<long long>(cold),
      100 * static_cast<double>(cold) / (1000 * static_cast<double>(step_us)), step_us);
  return 0;
}
