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

// The library measures the first three steps, and then every `each`-th. Reports come up to three steps later. That of
// step i is of 3 i, and that of the warm-up 5 s more.
TEST_CASE("On a GPU, what is reported of the warm-up does not count, and each report counts once") {
  const auto train = [](int64_t warmup, int64_t steps, int64_t each, int64_t behind) {
    CommunicationTimes times(3);
    int64_t asked = 0;
    for (int64_t i = 1; i <= steps; ++i) {
      if (!times.Wants(i - warmup)) continue;
      ++asked;
      int64_t reported = i - behind;
      while (reported > 3 && reported % each != 0) --reported;
      const int64_t ns = reported <= 0 ? 0 : 3 * reported + (reported <= warmup ? 5'000'000'000 : 0);
      times.Add(i - warmup, ns / 3, ns);
    }
    CHECK(asked < 20 + steps / 8);
    return times;
  };
  for (const int64_t each : {16, 2, 1}) {
    for (const int64_t behind : {0, 1, 3}) {
      for (const int64_t warmup : {0, 2, 5, 10, 15, 16, 17, 20, 100}) {
        for (const int64_t measured : {24, 40, 1000}) {
          INFO("one in " << each << ", " << behind << " behind, " << warmup << " and " << measured << " steps");
          const CommunicationTimes times = train(warmup, warmup + measured, each, behind);
          CHECK(times.communication().count() >= measured / 24);
          CHECK(times.communication().count() <= 8 + measured / 16);
          CHECK(times.communication().most_ns() <= 3 * (warmup + measured));
          CHECK(times.communication().least_ns() > 3 * warmup);
          CHECK(times.exposed().count() == times.communication().count());
        }
      }
    }
  }
  // Nothing but a warm-up is better than nothing.
  CHECK(train(10, 6, 16, 1).communication().least_ns() > 0);
}

}  // namespace
}  // namespace examples
