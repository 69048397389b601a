// SPDX-License-Identifier: Apache-2.0
// How the data of operations and messages travels between the ranks of a host.
#include "libddp/comm/host/placement.h"

#include <vector>

#include "tests/support/catch.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;
constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr Kind kMoves[] = {Kind::kAllGather, Kind::kAllGatherV, Kind::kAllToAll};

// One range each for `in` and `out`, in private memory that the peers can read, with room in all rings.
PlacementFacts Facts(Kind kind, size_t bytes, bool oversubscribed = false) {
  return {.kind = kind,
          .ranks = 2,
          .oversubscribed = oversubscribed,
          .in_bytes = bytes,
          .out_bytes = bytes,
          .in_ranges = 1,
          .out_ranges = 1,
          .readable = true,
          .has_large_row = true};
}

PlacementFacts Shared(PlacementFacts facts) {
  facts.shared = true;
  return facts;
}

TEST_CASE("data in shared memory is used in place at every size") {
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather, Kind::kAllToAll}) {
    for (const size_t bytes : {size_t{4}, 16 * kKiB, 64 * kMiB}) {
      for (const bool oversubscribed : {false, true}) {
        PlacementFacts facts = Shared(Facts(kind, bytes, oversubscribed));
        CHECK(CanBeShared(facts));
        CHECK(ChoosePlacement(facts) == Placement::kSharedRange);
        facts.out_ranges = 2;
        CHECK(ChoosePlacement(facts) == Placement::kSharedList);
      }
    }
  }
  CHECK(ChoosePlacement({.kind = Kind::kBarrier, .ranks = 2, .shared = true}) == Placement::kSharedList);
}

TEST_CASE("data that is not to be shared is not looked up") {
  PlacementFacts facts = Facts(Kind::kAllToAll, kMiB);
  facts.in_place = true;
  CHECK_FALSE(CanBeShared(facts));
  CHECK(ChoosePlacement(facts) == Placement::kPrivate);  // nor is it read, as it is overwritten meanwhile
  facts = Facts(Kind::kAllReduce, kMiB);
  facts.in_ranges = facts.out_ranges = kMaxListedRanges / 2;
  CHECK(CanBeShared(facts));
  ++facts.out_ranges;
  CHECK_FALSE(CanBeShared(facts));
  CHECK_FALSE(CanBeShared(Facts(Kind::kBroadcast, kInlineBytes)));
  CHECK(CanBeShared(Facts(Kind::kBroadcast, kInlineBytes + 1)));
}

TEST_CASE("a little private data travels with the announcement") {
  const auto inlined = [](Kind kind, size_t bytes, bool oversubscribed) {
    return ChoosePlacement(Facts(kind, bytes, oversubscribed)) == Placement::kInline;
  };
  for (const bool oversubscribed : {false, true}) {
    CHECK(inlined(Kind::kAllReduce, 8 * kKiB, oversubscribed));
    CHECK_FALSE(inlined(Kind::kAllReduce, 8 * kKiB + 4, oversubscribed));
    const size_t scattered = (oversubscribed ? 64 : 32) * kKiB, moved = (oversubscribed ? 64 : 16) * kKiB;
    CHECK(inlined(Kind::kReduceScatter, scattered, oversubscribed));
    CHECK_FALSE(inlined(Kind::kReduceScatter, scattered + 4, oversubscribed));
    for (const Kind kind : kMoves) {
      CHECK(inlined(kind, moved, oversubscribed));
      CHECK_FALSE(inlined(kind, moved + 4, oversubscribed));
    }
  }
  PlacementFacts many = Facts(Kind::kAllReduce, 2 * kKiB + 4);
  many.ranks = 4;
  CHECK(ChoosePlacement(many) == Placement::kInline);
  many.ranks = 5;
  CHECK(ChoosePlacement(many) == Placement::kPrivate);

  PlacementFacts without_row = Facts(Kind::kReduceScatter, 8 * kKiB + 4);
  without_row.has_large_row = without_row.readable = false;
  CHECK(ChoosePlacement(without_row) == Placement::kPrivate);
  without_row.in_bytes = without_row.out_bytes = 8 * kKiB;
  CHECK(ChoosePlacement(without_row) == Placement::kInline);
}

TEST_CASE("a broadcast travels inline if its root says so") {
  for (const bool root : {false, true}) {
    PlacementFacts facts = Shared(Facts(Kind::kBroadcast, 8 * kKiB));
    facts.is_root = root;
    CHECK(ChoosePlacement(facts) == Placement::kInline);
    facts.in_bytes = facts.out_bytes = 16 * kKiB;
    CHECK(ChoosePlacement(facts) == Placement::kSharedRange);
    facts.oversubscribed = true;
    CHECK(ChoosePlacement(facts) == (root ? Placement::kInline : Placement::kSharedRange));
    facts.shared = false;
    CHECK(ChoosePlacement(facts) == (root ? Placement::kInline : Placement::kReadable));
  }
}

TEST_CASE("larger private data is read where that is faster") {
  const auto reads = [](const PlacementFacts& facts) { return ChoosePlacement(facts) == Placement::kReadable; };
  for (const size_t bytes : {2 * kMiB - 4, 32 * kMiB + 4}) CHECK_FALSE(reads(Facts(Kind::kAllReduce, bytes)));
  for (const size_t bytes : {2 * kMiB, 32 * kMiB}) CHECK(reads(Facts(Kind::kAllReduce, bytes)));
  for (const Kind kind : kMoves) CHECK(reads(Facts(kind, 16 * kKiB + 4)));
  CHECK(reads(Facts(Kind::kReduceScatter, 32 * kKiB + 4)));

  PlacementFacts facts = Facts(Kind::kAllReduce, 4 * kMiB);
  facts.readable = false;
  CHECK_FALSE(reads(facts));
  facts = Facts(Kind::kAllReduce, 4 * kMiB);
  facts.out_ranges = 2;
  CHECK_FALSE(reads(facts));
  for (const int ranks : {1, 65}) {
    facts = Facts(Kind::kAllReduce, 4 * kMiB);
    facts.ranks = ranks;
    CHECK_FALSE(reads(facts));
  }
}

TEST_CASE("all ranks take the route that their placements allow") {
  using P = Placement;
  const auto route = [](const std::vector<P>& placements, int root = -1) { return ChooseRoute(placements, root); };
  CHECK(route({P::kInline, P::kInline}) == Route::kInline);
  CHECK(route({P::kInline, P::kPrivate}) == Route::kStaged);
  CHECK(route({P::kSharedRange, P::kSharedList}) == Route::kDirect);
  CHECK(route({P::kSharedRange, P::kReadable}) == Route::kStaged);
  CHECK(route({P::kReadable, P::kReadable}) == Route::kFetched);
  CHECK(route({P::kReadable, P::kPrivate}) == Route::kStaged);
  CHECK(route({P::kSharedRange, P::kInline}, 1) == Route::kInline);
  CHECK(route({P::kSharedRange, P::kInline}, 0) == Route::kStaged);
}

TEST_CASE("messages are eager up to a size") {
  CHECK(MaxEagerBytes(/*shared=*/true, /*oversubscribed=*/false) == 4 * kKiB);
  CHECK(MaxEagerBytes(/*shared=*/false, /*oversubscribed=*/false) == 8 * kKiB);
  CHECK(MaxEagerBytes(/*shared=*/true, /*oversubscribed=*/true) == 16 * kKiB);
  CHECK(MaxEagerBytes(/*shared=*/false, /*oversubscribed=*/true) == 32 * kKiB);
}

}  // namespace
}  // namespace ddp
