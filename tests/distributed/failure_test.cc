// SPDX-License-Identifier: Apache-2.0
// Fails on purpose: the build expects the message, and the end of the job without delay.
#include "tests/support/catch.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

TEST_CASE("a check fails on one rank while the others wait for it", "[.][fails]") {
  RunOnRanks([](Rank& rank) {
    if (rank.rank() == 1) RANK_CHECK_EQ(1, 2);
    rank.group().Barrier().Wait().IgnoreError();
    rank.Meet();
  });
}

}  // namespace
}  // namespace ddp::testing
