// SPDX-License-Identifier: Apache-2.0
// The times of steps, of short runs and of very long ones.
#include "examples/train/durations.h"

#include <cmath>
#include <cstdint>

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

}  // namespace
}  // namespace examples
