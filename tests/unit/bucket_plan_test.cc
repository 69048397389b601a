// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/bucket_plan.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "libddp/reducer/layout.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

using Indices = std::vector<size_t>;

std::vector<BucketItem> Floats(const std::vector<size_t>& bytes) {
  std::vector<BucketItem> items;
  for (const size_t b : bytes) items.push_back({DType::kFloat32, b});
  return items;
}

Indices Order(size_t n) {
  Indices order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

std::vector<Indices> ItemsOf(const std::vector<Bucket>& plan) {
  std::vector<Indices> items;
  for (const Bucket& bucket : plan) items.push_back(bucket.items);
  return items;
}

TEST_CASE("a bucket is closed when it has reached its cap, the first one earlier") {
  const auto plan = PlanBuckets(Floats({40, 40, 40, 40, 40, 40, 40}), Order(7), {50, 100, 50});
  CHECK(ItemsOf(plan) == std::vector<Indices>{{0, 1}, {2, 3, 4}, {5, 6}});
  CHECK(plan[0].bytes == 80);
  CHECK(plan[1].bytes == 120);
  CHECK(plan[2].bytes == 80);
}

TEST_CASE("exactly the cap closes a bucket") {
  CHECK(ItemsOf(PlanBuckets(Floats({50, 50, 50, 50}), Order(4), {50, 100, 50})) ==
        std::vector<Indices>{{0}, {1, 2}, {3}});
}

TEST_CASE("an item above the cap is not split") {
  CHECK(ItemsOf(PlanBuckets(Floats({1000, 10, 10}), Order(3), {50, 100, 50})) == std::vector<Indices>{{0}, {1, 2}});
  CHECK(ItemsOf(PlanBuckets(Floats({10, 1000, 10}), Order(3), {50, 100, 50})) == std::vector<Indices>{{0, 1}, {2}});
}

TEST_CASE("items are taken in the order given") {
  const auto plan = PlanBuckets(Floats({10, 20, 30, 40}), Indices{3, 1, 0, 2}, {60, 60, 60});
  CHECK(ItemsOf(plan) == std::vector<Indices>{{3, 1}, {0, 2}});
}

TEST_CASE("a bucket has one dtype; buckets come in the order in which they are complete") {
  std::vector<BucketItem> items = Floats({60, 60, 60, 60, 60});
  items[1].dtype = items[2].dtype = DType::kBFloat16;
  const auto plan = PlanBuckets(items, Order(5), {100, 100, 100});
  // float32: {0, 3} complete at 3, {4} at 4; bfloat16: {1, 2} complete at 2.
  CHECK(ItemsOf(plan) == std::vector<Indices>{{1, 2}, {0, 3}, {4}});
  CHECK(plan[0].dtype == DType::kBFloat16);
  CHECK(plan[1].dtype == DType::kFloat32);
}

TEST_CASE("empty items take part; nothing gives no buckets") {
  CHECK(ItemsOf(PlanBuckets(Floats({0, 0, 10}), Order(3), {5, 100, 5})) == std::vector<Indices>{{0, 1, 2}});
  CHECK(ItemsOf(PlanBuckets(Floats({0}), Order(1), {5, 100, 5})) == std::vector<Indices>{{0}});
  CHECK(PlanBuckets({}, {}, {5, 100, 5}).empty());
}

std::vector<size_t> SizesOf(const std::vector<Bucket>& plan) {
  std::vector<size_t> sizes;
  for (const Bucket& bucket : plan) sizes.push_back(bucket.bytes);
  return sizes;
}

// Without tapering, for items of one dtype.
std::vector<size_t> PlainSizes(const std::vector<BucketItem>& items, size_t first_cap, size_t cap) {
  std::vector<size_t> sizes;
  bool full = true;
  for (const BucketItem& item : items) {
    if (full) sizes.push_back(0);
    sizes.back() += item.bytes;
    full = sizes.back() >= (sizes.size() == 1 ? first_cap : cap);
  }
  return sizes;
}

TEST_CASE("buckets grow from the first one and taper towards the end") {
  const auto sizes = [](size_t n, size_t bytes, size_t first_cap, size_t cap) {
    return SizesOf(PlanBuckets(Floats(std::vector<size_t>(n, bytes)), Order(n), {first_cap, cap, first_cap}));
  };
  using Sizes = std::vector<size_t>;
  CHECK(sizes(320, 1, 10, 1000) == Sizes{10, 20, 40, 80, 90, 45, 22, 13});
  CHECK(sizes(330, 1, 10, 1000) == Sizes{10, 20, 40, 80, 95, 47, 24, 14});
  CHECK(sizes(410, 1, 10, 100) == Sizes{10, 20, 40, 80, 100, 85, 42, 21, 12});
  CHECK(sizes(24, 1, 1, 25) == Sizes{1, 2, 4, 8, 5, 2, 2});
  CHECK(sizes(96, 1, 1, 25) == Sizes{1, 2, 4, 8, 16, 25, 20, 10, 5, 3, 2});
  CHECK(sizes(5, 40, 20, 1000) == Sizes{40, 80, 40, 40});  // items of twice the last cap
  const std::vector<BucketItem> ones = Floats(std::vector<size_t>(320, 1));
  CHECK(SizesOf(PlanBuckets(ones, Order(320), {10, 1000, 50})) == Sizes{10, 20, 40, 80, 110, 60});  // to another size
  CHECK(SizesOf(PlanBuckets(ones, Order(320), {10, 1000, 1000})) == Sizes{10, 310});
}

TEST_CASE("up to twice the last cap stays one bucket") {
  const auto plan = [](const std::vector<size_t>& bytes) {
    return ItemsOf(PlanBuckets(Floats(bytes), Order(bytes.size()), {50, 1000, 50}));
  };
  CHECK(plan({20, 20}) == std::vector<Indices>{{0, 1}});
  CHECK(plan({50, 25, 25, 25, 25}) == std::vector<Indices>{{0}, {1, 2, 3, 4}});
  CHECK(plan({50, 25, 25, 25, 25, 1}) == std::vector<Indices>{{0}, {1, 2}, {3, 4, 5}});
  CHECK(plan({50, 0, 0, 90, 0, 0}) == std::vector<Indices>{{0}, {1, 2, 3, 4, 5}});
}

TEST_CASE("items of uneven sizes are divided where it fits best") {
  const auto plan = [](const std::vector<size_t>& bytes) {
    return ItemsOf(PlanBuckets(Floats(bytes), Order(bytes.size()), {50, 1000, 50}));
  };
  CHECK(plan({50, 30, 30, 2000}) == std::vector<Indices>{{0}, {1, 2}, {3}});      // a large one comes last
  CHECK(plan({50, 30, 2000}) == std::vector<Indices>{{0}, {1, 2}});               // not for less than the last cap
  CHECK(plan({50, 60, 500, 20}) == std::vector<Indices>{{0}, {1, 2}, {3}});       // little behind a large one
  CHECK(plan({50, 60, 60, 20}) == std::vector<Indices>{{0}, {1}, {2, 3}});        // 50 are wanted: as near, 80 or 20
  CHECK(plan({200, 300, 400, 300}) == std::vector<Indices>{{0}, {1, 2}, {3}});    // 475: 300 rather than 700
  CHECK(plan({200, 350, 400, 300}) == std::vector<Indices>{{0}, {1}, {2}, {3}});  // 500: as near, then the latter
  CHECK(plan({50, 500, 60, 40, 300}) == std::vector<Indices>{{0}, {1}, {2, 3}, {4}});  // 425: 400; 175: 300
}

TEST_CASE("each dtype grows and tapers") {
  std::vector<BucketItem> items = Floats(std::vector<size_t>(32, 10));
  for (size_t i = 0; i < 32; i += 2) items[i].dtype = DType::kFloat16;
  const auto plan = PlanBuckets(items, Order(32), {10, 1000, 10});
  CHECK(SizesOf(plan) == std::vector<size_t>{10, 10, 20, 20, 40, 40, 50, 50, 20, 20, 20, 20});
  for (size_t b = 0; b < plan.size(); ++b) {
    CHECK(plan[b].dtype == (b % 2 == 0 ? DType::kFloat16 : DType::kFloat32));
  }
}

TEST_CASE("nothing grows or tapers if the last cap is not below the others") {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<BucketItem> items;
    for (size_t i = random() % 60; i-- > 0;) items.push_back({DType::kFloat32, random() % 100});
    const size_t cap = 1 + random() % 400, first_cap = cap + (round % 2 == 0 ? 0 : random() % 400);
    REQUIRE(SizesOf(PlanBuckets(items, Order(items.size()), {first_cap, cap, first_cap})) ==
            PlainSizes(items, first_cap, cap));
  }
  const auto all = Floats(std::vector<size_t>(100, 1000));
  CHECK(PlanBuckets(all, Order(100), {SIZE_MAX / 2, SIZE_MAX / 2, SIZE_MAX / 2}).size() == 1);
  CHECK(PlanBuckets(all, Order(100), {1, 1, 1}).size() == 100);
}

// A bucket hides behind what comes after it, but for the last cap; the last one is small, as far as items are. None is
// as large, without its last item, as twice the largest before it. All this costs few more buckets.
TEST_CASE("what holds for both ends of every plan") {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    const size_t largest = std::vector<size_t>{1, 5, 30, 200, 1000}[random() % 5];
    std::vector<BucketItem> items;
    for (size_t i = 1 + random() % 300; i-- > 0;) items.push_back({DType::kFloat32, 1 + random() % largest});
    const size_t first_cap = 1 + random() % 100, cap = first_cap + 1 + random() % 3000;
    const auto plan = PlanBuckets(items, Order(items.size()), {first_cap, cap, first_cap});
    size_t after = 0;
    for (size_t b = plan.size(); b-- > 1;) {
      const size_t bytes = plan[b].bytes, last = items[plan[b].items.back()].bytes;
      if (b + 1 == plan.size()) {
        REQUIRE(bytes <= std::max(2 * first_cap, first_cap + last));
      } else {
        REQUIRE(bytes >= first_cap);
        REQUIRE(bytes <= std::max(2 * first_cap, after + first_cap + last));
      }
      after += bytes;
    }
    size_t limit = first_cap, doublings = 0;
    for (const Bucket& bucket : plan) {
      REQUIRE(bucket.bytes - items[bucket.items.back()].bytes < limit);
      limit = std::max(limit, 2 * bucket.bytes);
    }
    while (first_cap << doublings < cap) ++doublings;
    REQUIRE(plan.size() <= PlainSizes(items, first_cap, cap).size() + 2 * doublings);
    REQUIRE(Lateness(plan, items, Order(items.size())) == 0);
  }
}

// For any input: each item once; within a bucket in the order given, one dtype, not below the first cap but for the
// last of its dtype, and not fuller than needed; launch order is the order of completion.
TEST_CASE("what holds for every plan") {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const size_t n = 1 + random() % 60;
    std::vector<BucketItem> items;
    for (size_t i = 0; i < n; ++i) {
      items.push_back({random() % 3 == 0 ? DType::kFloat16 : DType::kFloat32, random() % 100});
    }
    Indices order = Order(n);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<size_t> position(n);
    for (size_t i = 0; i < n; ++i) position[order[i]] = i;
    const size_t first_cap = 1 + random() % 100, cap = first_cap + random() % 300;
    const auto plan = PlanBuckets(items, order, {first_cap, cap, first_cap});

    std::vector<int> seen(n);
    size_t complete = 0;
    std::vector<bool> closed_last(256), any(256);
    for (size_t b = 0; b < plan.size(); ++b) {
      REQUIRE_FALSE(plan[b].items.empty());
      const size_t type = static_cast<size_t>(plan[b].dtype);
      REQUIRE_FALSE(closed_last[type]);  // only the last of a dtype may be so small
      size_t bytes = 0;
      for (size_t k = 0; k < plan[b].items.size(); ++k) {
        const size_t item = plan[b].items[k];
        ++seen[item];
        bytes += items[item].bytes;
        REQUIRE(items[item].dtype == plan[b].dtype);
        if (k > 0) REQUIRE(position[plan[b].items[k - 1]] < position[item]);
      }
      REQUIRE(bytes == plan[b].bytes);
      const size_t limit = any[type] ? cap : first_cap;
      any[type] = true;
      REQUIRE(bytes - items[plan[b].items.back()].bytes < limit);
      closed_last[type] = bytes < first_cap;
      const size_t last = position[plan[b].items.back()];
      if (b > 0) REQUIRE(last > complete);
      complete = last;
    }
    REQUIRE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
  }
}

TEST_CASE("lateness is what had become ready beyond the buckets when one was launched") {
  const auto items = Floats({10, 20, 30, 40});
  const auto plan = PlanBuckets(items, Order(4), {30, 30, 30});  // {0, 1}, {2}, {3}
  CHECK(Lateness(plan, items, Order(4)) == 0);
  CHECK(Lateness(plan, items, Indices{1, 0, 2, 3}) == 0);   // within a bucket
  CHECK(Lateness(plan, items, Indices{0, 2, 1, 3}) == 30);  // the first one waits for what belongs to the second
  CHECK(Lateness(plan, items, Indices{3, 2, 1, 0}) == 70);
  CHECK(Lateness(plan, items, Indices{0, 1, 3, 2}) == 40);
  CHECK(SamePlan(plan, PlanBuckets(items, Order(4), {25, 30, 25})));
  CHECK_FALSE(SamePlan(plan, PlanBuckets(items, Indices{1, 0, 2, 3}, {30, 30, 30})));
  CHECK_FALSE(SamePlan(plan, PlanBuckets(items, Order(4), {1000, 30, 1000})));
}

TEST_CASE("ranges are cut in pieces that cover them in order") {
  static char memory[8192];
  const auto range = [](size_t offset, size_t count) { return Buffer{memory + offset, count, DType::kFloat16, {}}; };
  const std::vector<Buffer> ranges = {range(0, 300), range(1024, 0), range(1024, 1000), range(4096, 1)};
  CHECK(CutPieces(ranges, 0).size() == 1);
  CHECK(CutPieces(ranges, 0)[0].size() == 4);
  for (const size_t bytes : {size_t{1}, size_t{256}, size_t{700}, size_t{1024}, size_t{100'000}}) {
    const auto pieces = CutPieces(ranges, bytes);
    const size_t most = std::max<size_t>(256, bytes);
    std::vector<const char*> expected, seen;
    for (const Buffer& r : ranges) {
      for (size_t i = 0; i < r.count; ++i) expected.push_back(static_cast<const char*>(r.data) + 2 * i);
    }
    for (const auto& piece : pieces) {
      size_t total = 0;
      for (const Buffer& r : piece) {
        total += r.count * 2;
        for (size_t i = 0; i < r.count; ++i) seen.push_back(static_cast<const char*>(r.data) + 2 * i);
      }
      CHECK(total <= most);
      CHECK(total > 0);
    }
    CHECK(seen == expected);
    if (bytes == 256) CHECK(pieces.size() == 3 + 8 + 1);
    if (bytes == 100'000) CHECK(pieces.size() == 1);
  }
}

TEST_CASE("what the library owns lies in arenas by dtype, aligned, in the order given") {
  const std::vector<Buffer> items = {{nullptr, 10, DType::kFloat32, {}},
                                     {nullptr, 100, DType::kFloat16, {}},
                                     {nullptr, 65, DType::kFloat32, {}},
                                     {nullptr, 7, DType::kFloat32, {}}};
  const Layout layout = LayOut(items, {true, true, true, false}, Indices{3, 2, 1, 0});
  REQUIRE(layout.arenas.size() == 2);
  CHECK(layout.places[3].arena == -1);
  const Place second = layout.places[2], first = layout.places[0], half = layout.places[1];
  CHECK(second.arena == first.arena);
  CHECK(second.offset == 0);
  CHECK(first.offset == 512);  // behind 260 bytes
  CHECK(layout.arenas[static_cast<size_t>(first.arena)].dtype == DType::kFloat32);
  CHECK(layout.arenas[static_cast<size_t>(first.arena)].bytes >= 512 + 40);
  CHECK(half.arena != first.arena);
  CHECK(layout.arenas[static_cast<size_t>(half.arena)].dtype == DType::kFloat16);
}

TEST_CASE("ranges that lie one behind the other become one") {
  static char memory[4096];
  const auto range = [](size_t offset, size_t count) { return Buffer{memory + offset, count, DType::kFloat32, {}}; };
  const Buffer arena = range(0, sizeof(memory) / sizeof(float));
  const auto merge = [&](const std::vector<Buffer>& buffers) { return MergeAdjacent(buffers, {&arena, 1}); };
  // Padding of up to one alignment is taken in; a gap of more is not, nor is one that lies before.
  CHECK(merge({range(0, 64), range(256, 64)}).size() == 1);
  CHECK(merge({range(0, 60), range(256, 64)}).size() == 1);
  const auto merged = merge({range(0, 60), range(256, 10), range(512, 1)});
  REQUIRE(merged.size() == 1);
  CHECK(merged[0].data == memory);
  CHECK(merged[0].count == 129);
  CHECK(merge({range(0, 64), range(1024, 64)}).size() == 2);
  CHECK(merge({range(256, 64), range(0, 64)}).size() == 2);
  CHECK(merge({}).empty());
}

TEST_CASE("what lies between ranges outside of the arenas is not taken in") {
  static char memory[4096];
  const auto range = [](size_t offset, size_t count) { return Buffer{memory + offset, count, DType::kFloat32, {}}; };
  const std::vector<Buffer> apart = {range(0, 60), range(256, 64)};
  CHECK(MergeAdjacent(apart, {}).size() == 2);
  const Buffer arena = range(0, 64);  // holds only the first
  CHECK(MergeAdjacent(apart, {&arena, 1}).size() == 2);
  CHECK(MergeAdjacent({range(0, 64), range(256, 64)}, {}).size() == 1);
}

}  // namespace
}  // namespace ddp
