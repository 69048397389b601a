// SPDX-License-Identifier: Apache-2.0
// The times of steps, of short runs and of very long ones.
#include "examples/train/durations.h"

#include <cmath>
#include <cstdint>

#include "examples/train/summary.h"
#include "tests/support/catch.h"

namespace examples {
namespace {

TEST_CASE("The first durations are left out, unless there are no others") {
  Durations durations(2);
  CHECK(durations.median_ns() == 0);
  durations.Add(1000);
  durations.Add(3000);
  CHECK(durations.warmup_counted());
  CHECK(durations.count() == 2);
  CHECK(durations.median_ns() == 2000);
  for (const int64_t ns : {7, 5, 60}) durations.Add(ns);
  CHECK_FALSE(durations.warmup_counted());
  CHECK(durations.count() == 3);
  CHECK(durations.sum_ns() == 72);
  CHECK(durations.least_ns() == 5);
  CHECK(durations.most_ns() == 60);
  CHECK(durations.median_ns() == 7);
  durations.Restart();
  CHECK(durations.count() == 0);
  CHECK(durations.median_ns() == 0);
  for (const int64_t ns : {100, 200, 9}) durations.Add(ns);
  CHECK(durations.sum_ns() == 9);
}

TEST_CASE("A long run needs no more memory, and keeps its median to what the spacing allows") {
  Durations durations(0);
  constexpr int64_t kSteps = 1'000'000;
  for (int64_t i = 0; i < kSteps; ++i) durations.Add(i);
  CHECK(durations.count() == kSteps);
  CHECK(durations.sum_ns() == kSteps * (kSteps - 1) / 2);
  CHECK(durations.least_ns() == 0);
  CHECK(durations.most_ns() == kSteps - 1);
  CHECK(std::abs(durations.median_ns() - kSteps / 2.0) <= 2.0 * kSteps / (Durations::kMost / 2));
}

TEST_CASE("Communication and exposed time are means of the same measured steps") {
  constexpr int64_t kMs = 1'000'000;
  Durations steps(2);
  CommunicationTimes times(0);
  for (int i = -1; i <= 0; ++i) {  // the warm-up waits for slow starts
    steps.Add(900 * kMs);
    REQUIRE(times.Wants(i));
    times.Add(i, 800 * kMs, 850 * kMs);
  }
  for (int i = 1; i <= 100; ++i) {  // nine steps of ten hide nearly all, the tenth waits
    const bool waits = i % 10 == 0;
    steps.Add(20 * kMs);
    REQUIRE(times.Wants(i));
    times.Add(i, waits ? 10 * kMs : kMs / 100, waits ? 12 * kMs : 2 * kMs);
  }
  Summary summary;
  Measure(steps, times, summary);
  CHECK(summary.exposed_comm_ms == 0.01);
  CHECK(summary.mean_communication_ms == 3);
  CHECK(std::abs(summary.mean_exposed_ms - 1.009) < 1e-12);
  CHECK(std::abs(summary.overlap() - (1 - 1.009 / 3)) < 1e-12);

  Summary none;
  Measure(Durations(0), CommunicationTimes(0), none);
  CHECK(none.mean_communication_ms == 0);
  CHECK(none.overlap() == 0);
}

// The report in a step is that of the step before the last. The first two steps try out plans.
TEST_CASE("On a GPU, what is reported of the warm-up does not count, and not every step is asked for") {
  const auto train = [](int64_t warmup, int64_t steps) {
    CommunicationTimes times(2);
    int64_t asked = 0;
    for (int64_t i = 1; i <= steps; ++i) {
      if (!times.Wants(i - warmup)) continue;
      ++asked;
      const int64_t reported = i - 2;
      const int64_t ns = reported <= 0 ? 0 : reported <= 2 ? 5'000'000'000 : 3000;
      times.Add(i - warmup, ns / 3, ns);
    }
    CHECK(asked < 20 + steps / 8);
    return times;
  };
  for (const int64_t warmup : {2, 5, 20, 100}) {
    INFO("warm-up of " << warmup);
    for (const int64_t measured : {3, 10, 30, 1000}) {
      const CommunicationTimes times = train(warmup, warmup + measured);
      CHECK(times.communication().count() > measured / 20);
      CHECK(times.communication().most_ns() == 3000);
      CHECK(times.exposed().most_ns() == 1000);
      CHECK(times.exposed().count() == times.communication().count());
    }
  }
  // Nothing but a warm-up is better than nothing.
  CHECK(train(10, 6).communication().most_ns() > 0);
}

}  // namespace
}  // namespace examples
