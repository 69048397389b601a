// SPDX-License-Identifier: Apache-2.0
// What is counted as communication.
#include "libddp/reducer/statistics.h"

#include <vector>

#include "tests/support/catch.h"

namespace ddp {
namespace {

BucketTimes Bucket(int64_t launched, int64_t done) {
  BucketTimes times;
  times.launched_ns = launched;
  times.done_ns = done;
  return times;
}

TEST_CASE("communication is the time in which at least one bucket is under way") {
  Statistics statistics;
  statistics.CountStep();
  statistics.Record({Bucket(10, 40), Bucket(20, 30), Bucket(35, 60), Bucket(100, 120)}, 15);
  DdpStatistics s = statistics.Get();
  CHECK(s.communication_ns == 50 + 20);
  CHECK(s.exposed_ns == 15);
  CHECK(s.overlap == 1 - 15.0 / 70);
  // Of all steps; and no more is exposed than there is.
  statistics.Record({Bucket(0, 30)}, 1000);
  s = statistics.Get();
  CHECK(s.communication_ns == 30);
  CHECK(s.exposed_ns == 30);
  CHECK(s.overlap == 1 - 45.0 / 100);
}

TEST_CASE("nothing communicated, nothing hidden") {
  Statistics statistics;
  CHECK(statistics.Get().overlap == 0);
  statistics.CountPlan();
  CHECK(statistics.Get().plans == 1);
}

}  // namespace
}  // namespace ddp
