// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/world_ranks.h"

#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "ddp/process_group.h"
#include "libddp/base/failed_ranks.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

TEST_CASE("the world's own ranks need no second name") {
  const absl::Status error = absl::UnavailableError("rank 1 has died");
  for (const WorldRanks& same : {WorldRanks(), WorldRanks({0, 1, 2}), WorldRanks({4, 0, 1}).Part({1, 2})}) {
    CHECK(same.of(1) == 1);
    CHECK(same.NameOf(1) == "rank 1");
    CHECK(same.Note(1, {2}).empty());
    CHECK(same.Named(error, 0) == error);
  }
}

TEST_CASE("a part of a part is named by the ranks of the world") {
  const WorldRanks part = WorldRanks({1, 3, 5, 7}).Part({3, 1});
  CHECK(part.of(0) == 7);
  CHECK(part.of(1) == 3);
  CHECK(part.NameOf(1) == "rank 1 (rank 3 of the world)");
  CHECK(part.Note(0, {}) == "; ranks 0, 1 of this group are ranks 7, 3 of the world");
}

TEST_CASE("an error gets the ranks of the world once, and keeps its failed ranks") {
  const WorldRanks part({2, 0});
  const absl::Status error = WithFailedRanks(absl::UnavailableError("rank 1 has died"), {1});
  const absl::Status named = part.Named(error, 0);
  CHECK(named.code() == absl::StatusCode::kUnavailable);
  CHECK(named.message() == "rank 1 has died; ranks 0, 1 of this group are ranks 2, 0 of the world");
  CHECK(FailedRanks(named) == std::vector<int>{1});
  CHECK(part.Named(named, 1) == named);
  CHECK(part.Named(absl::OkStatus(), 0).ok());
}

TEST_CASE("of a large group only the ranks that the error is about are named") {
  std::vector<int> ranks(1000);
  std::iota(ranks.begin(), ranks.end(), 100);
  const WorldRanks part(ranks);
  CHECK(part.Note(7, {}) == "; rank 7 of this group is rank 107 of the world");
  CHECK(part.Named(WithFailedRanks(absl::UnavailableError("gone"), {9, 3}), 7).message() ==
        "gone; ranks 3, 7, 9 of this group are ranks 103, 107, 109 of the world");
}

}  // namespace
}  // namespace ddp
