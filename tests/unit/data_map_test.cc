// SPDX-License-Identifier: Apache-2.0
// Which elements of whose data operations reduce and move.
#include "libddp/comm/host/data_map.h"

#include <algorithm>
#include <vector>

#include "tests/support/catch.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

// How often each element of the result is written.
void Count(const Piece& piece, std::vector<int>* writes) {
  REQUIRE(piece.to + piece.elements <= writes->size());
  for (size_t i = 0; i < piece.elements; ++i) ++(*writes)[piece.to + i];
}

bool AllOnce(const std::vector<int>& writes) {
  return std::all_of(writes.begin(), writes.end(), [](int n) { return n == 1; });
}

TEST_CASE("what is moved to a rank fills its result exactly once") {
  for (const int ranks : {1, 2, 3, 5}) {
    const size_t n = static_cast<size_t>(ranks);
    std::vector<size_t> begins{0};
    for (size_t r = 0; r < n; ++r) begins.push_back(begins.back() + r * 7 % 5);
    for (const size_t count : {size_t{0}, 6 * n, 1000 * n}) {
      for (int rank = 0; rank < ranks; ++rank) {
        for (const Kind kind : {Kind::kAllGather, Kind::kAllGatherV, Kind::kAllToAll, Kind::kBroadcast}) {
          const bool v = kind == Kind::kAllGatherV;
          OperationKey key{.kind = kind};
          key.root = static_cast<uint16_t>(ranks - 1);
          const DataMap map(key, v ? begins.back() : count,
                            v ? absl::MakeConstSpan(begins) : absl::Span<const size_t>(), ranks);
          std::vector<int> writes(map.ResultElements(rank));
          for (int r = 0; r < ranks; ++r) {
            const Piece piece = map.Moved(r, rank);
            CHECK(piece.from + piece.elements <= map.InElements(r));
            Count(piece, &writes);
          }
          CHECK(AllOnce(writes));
        }
      }
    }
  }
}

TEST_CASE("each element of an all-reduce has one owner, whose results the others copy") {
  for (const int ranks : {1, 2, 3, 7}) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{64}, size_t{65}, size_t{1000}}) {
      const DataMap map({.kind = Kind::kAllReduce}, count, {}, ranks);
      std::vector<int> owners(count);
      for (int r = 0; r < ranks; ++r) {
        const Piece own = map.Reduced(r);
        CHECK(own.from == own.to);
        CHECK((own.elements == 0 || own.from % kShareAlign == 0));
        CHECK(own.elements == map.ResultElements(r));
        Count(own, &owners);
        std::vector<int> writes(count);
        Count(own, &writes);
        for (int s = 0; s < ranks; ++s) Count(map.Moved(s, r), &writes);
        CHECK(AllOnce(writes));
      }
      CHECK(AllOnce(owners));
    }
  }
}

TEST_CASE("a reduce-scatter reduces one part for each rank") {
  const DataMap map({.kind = Kind::kReduceScatter}, 12, {}, 3);
  for (int r = 0; r < 3; ++r) {
    const Piece piece = map.Reduced(r);
    CHECK(piece.from == static_cast<size_t>(r) * 4);
    CHECK(piece.to == 0);
    CHECK(piece.elements == 4);
    CHECK(map.Moved(r, 0).elements == 0);
  }
}

}  // namespace
}  // namespace ddp
