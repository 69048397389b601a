// SPDX-License-Identifier: Apache-2.0
// How the learning rate goes on, step by step.
#include "examples/train/schedule.h"

#include "tests/support/catch.h"

namespace examples {
namespace {

using ddp::testing::Approx;

TEST_CASE("A constant learning rate, and one that warms up") {
  CHECK(ScheduleFactor({}, 0) == 1);
  CHECK(ScheduleFactor({}, 1000000) == 1);
  const Schedule schedule = {.warmup_steps = 4};
  CHECK(ScheduleFactor(schedule, 0) == 0.25);
  CHECK(ScheduleFactor(schedule, 2) == 0.75);
  CHECK(ScheduleFactor(schedule, 3) == 1);
  CHECK(ScheduleFactor(schedule, 4) == 1);
}

TEST_CASE("Half a cosine wave, after the warm-up") {
  const Schedule schedule = {.kind = Schedule::Kind::kCosine, .warmup_steps = 10, .total_steps = 110};
  CHECK(ScheduleFactor(schedule, 4) == 0.5);
  CHECK(ScheduleFactor(schedule, 10) == 1);
  CHECK(ScheduleFactor(schedule, 35) == Approx(0.8535534));
  CHECK(ScheduleFactor(schedule, 60) == Approx(0.5));
  CHECK(ScheduleFactor(schedule, 110) == Approx(0).margin(1e-12));
  CHECK(ScheduleFactor(schedule, 200) == Approx(0).margin(1e-12));
  // All of it is warm-up.
  CHECK(ScheduleFactor({.kind = Schedule::Kind::kCosine, .warmup_steps = 10, .total_steps = 10}, 9) == 1);
}

TEST_CASE("A learning rate that falls in steps") {
  const Schedule schedule = {.kind = Schedule::Kind::kStep, .warmup_steps = 2, .step_size = 5, .gamma = 0.5};
  CHECK(ScheduleFactor(schedule, 0) == 0.5);
  CHECK(ScheduleFactor(schedule, 4) == 1);
  CHECK(ScheduleFactor(schedule, 5) == 0.5);
  CHECK(ScheduleFactor(schedule, 10) == 0.25);
}

TEST_CASE("A learning rate depends on the data that has been seen, also where steps have changed their size") {
  // 100 steps were done that are worth 50 of those that follow.
  Schedule schedule = {.kind = Schedule::Kind::kStep, .step_size = 25, .origin = 50, .gamma = 0.5};
  CHECK(ScheduleFactor(schedule, 100) == 0.25);
  CHECK(ScheduleFactor(schedule, 125) == 0.125);
  schedule = {.kind = Schedule::Kind::kCosine, .total_steps = 150, .origin = 50};
  CHECK(ScheduleFactor(schedule, 100) == Approx(0.5));
  CHECK(ScheduleFactor(schedule, 150) == Approx(0).margin(1e-12));
  schedule.warmup_steps = 60;
  CHECK(ScheduleFactor(schedule, 100) == 1);  // the warm-up is over, the wave has not begun
}

}  // namespace
}  // namespace examples
