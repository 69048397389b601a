// SPDX-License-Identifier: Apache-2.0
// Where things lie in a ChannelBlock: nothing over anything else, all within it.
#include "libddp/comm/messages/channel_block.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

namespace ddp {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 64};

struct Region {
  char* begin;
  size_t bytes;
};

void CheckApart(std::vector<Region> regions, char* base, size_t bytes) {
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < regions.size(); ++i) {
    char* const end = i + 1 < regions.size() ? regions[i + 1].begin : base + bytes;
    if (regions[i].begin < base || regions[i].begin + regions[i].bytes > end) FAIL("region " << i << " of them");
    REQUIRE(static_cast<size_t>(regions[i].begin - base) % kCacheLine == 0);
  }
}

TEST_CASE("channels, envelopes, rings, pipes and chunks lie apart") {
  for (const int ranks : kRanks) {
    const size_t bytes = ChannelBlock::Bytes(ranks);
    char* const base = reinterpret_cast<char*>(size_t{1} << 40);  // nothing is read or written
    const ChannelBlock block(base, ranks);
    std::vector<Region> regions;
    for (int s = 0; s < ranks; ++s) {
      regions.push_back({reinterpret_cast<char*>(&block.bounce_ring(s)), sizeof(BounceRing)});
      for (uint64_t c = 0; c < kBounceChunks; ++c) regions.push_back({block.chunk(s, c), kBounceBytes});
      for (int r = 0; r < ranks; ++r) {
        if (r == s) continue;
        regions.push_back({reinterpret_cast<char*>(&block.channel(s, r)), sizeof(Channel)});
        if (block.ring_bytes() > 0) regions.push_back({block.ring(s, r), block.ring_bytes()});
        for (uint64_t e = 0; e < kEnvelopes; ++e) {
          const size_t most = block.EnvelopeBytes(block.envelope_bytes());
          regions.push_back({reinterpret_cast<char*>(&block.envelope(s, r, e)), most});
        }
      }
    }
    CheckApart(std::move(regions), base, bytes);
  }
  CHECK(ChannelBlock::Bytes(0) == 0);
}

TEST_CASE("as many messages as there are envelopes lie apart in a ring") {
  for (const int ranks : kRanks) {
    const ChannelBlock block(nullptr, ranks);
    const size_t least = block.envelope_bytes() + 1, most = block.most_bytes();
    CHECK(block.InEnvelope(most) == (block.ring_bytes() == 0));
    if (block.InEnvelope(most)) continue;
    std::minstd_rand random(static_cast<unsigned>(ranks));
    std::deque<std::pair<size_t, size_t>> unread;
    size_t end = 0;
    for (int k = 0; k < 10'000; ++k) {
      const size_t bytes = k % 3 == 0 ? most : least + random() % (most - least + 1);
      const size_t place = block.Place(&end, bytes);
      REQUIRE(place % kCacheLine == 0);
      REQUIRE(place + bytes <= block.ring_bytes());
      for (const auto& [other, size] : unread) REQUIRE((place + bytes <= other || other + size <= place));
      unread.emplace_back(place, bytes);
      if (unread.size() == kEnvelopes) unread.pop_front();
    }
  }
}

TEST_CASE("data lie in the line of the header, behind it, or in the ring") {
  for (const int ranks : kRanks) {
    if (ranks == 1) continue;
    const ChannelBlock block(reinterpret_cast<char*>(size_t{1} << 40), ranks);
    Envelope& e = block.envelope(0, 1, 3);
    char* const begin = reinterpret_cast<char*>(&e);
    CHECK(block.payload(0, 1, e, 0) == begin + sizeof(Envelope));
    CHECK(block.payload(0, 1, e, kCacheLine - sizeof(Envelope)) == begin + sizeof(Envelope));
    CHECK(block.payload(0, 1, e, kCacheLine - sizeof(Envelope) + 1) == begin + kCacheLine);
    CHECK(block.payload(0, 1, e, block.envelope_bytes()) == begin + kCacheLine);
  }
}

}  // namespace
}  // namespace ddp
