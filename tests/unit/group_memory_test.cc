// SPDX-License-Identifier: Apache-2.0
// The memory of a group: where its parts lie, and that a number stands for one allocation on all ranks.
#include "libddp/comm/memory/group_memory.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/comm/base/progress_thread.h"
#include "libddp/comm/hierarchical_group.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

TEST_CASE("parts are whole pages of whatever size, and not a power of two apart") {
  constexpr size_t kApart = size_t{256} << 20;
  for (const size_t page : {size_t{4096}, size_t{16} << 10, size_t{64} << 10}) {
    for (const size_t bytes :
         {size_t{1}, size_t{4096}, size_t{65537}, kApart - 12288, kApart - 65536, kApart, 3 * kApart}) {
      INFO("page " << page << ", bytes " << bytes);
      const size_t stride = StrideFor(bytes, page);
      CHECK(stride % page == 0);
      CHECK(stride >= bytes);
      if (bytes % kApart == 0) CHECK(stride % kApart != 0);
    }
  }
}

TEST_CASE("the pages that a range touches") {
  const PageSpan span = WholePages(70'000, 60'000, 65536);
  CHECK(span.begin == 65536);
  CHECK(span.end == 131072);
  CHECK(WholePages(65536, 65536, 65536).begin == 65536);
  CHECK(WholePages(65536, 65536, 65536).end == 131072);
  CHECK(WholePages(65535, 2, 65536).begin == 0);
  CHECK(WholePages(65535, 2, 65536).end == 131072);
}

// A group of two ranks, which are threads, with few numbers for allocations.
struct SmallGroup {
  static constexpr int kRanks = 2;
  static constexpr uint64_t kNumbers = 4;

  ProgressThread progress;
  std::vector<std::unique_ptr<ProcessGroup>> ranks;

  SmallGroup() {
    const auto segment = SharedSegment::Create(HostGroupBytes(kRanks), SharedSegment::Kind::kAuto).value();
    GroupOptions options;
    options.timeout = absl::Seconds(50);
    options.progress = &progress;
    Members members;
    members.all.assign(kRanks, Introduction::OfSelf(0).value());
    members.layout = CutIntoNodes(std::vector<std::string>(kRanks), 0);
    members.peers = PeerWatch::Create(std::vector<ProcessId>(kRanks, members.all[0].process)).value();
    for (members.rank = 0; members.rank < kRanks; ++members.rank) {
      ranks.push_back(MakeHostGroup(members, segment, options, kNumbers));
    }
  }

  // On all ranks at once.
  void Run(const std::function<void(ProcessGroup&, size_t rank)>& body) {
    std::thread other([&] { body(*ranks[1], 1); });
    body(*ranks[0], 0);
    other.join();
  }
};

TEST_CASE("no two allocations in use have one number, though numbers go round") {
  constexpr size_t kCount = 3000;
  SmallGroup group;
  std::vector<std::vector<Allocation>> memory(2, std::vector<Allocation>(4));
  std::vector<absl::Status> statuses(2);
  const auto allocate = [&](size_t which) {
    group.Run([&](ProcessGroup& g, size_t r) {
      absl::StatusOr<Allocation> made = g.Allocate(kCount * sizeof(int32_t), {});
      statuses[r] = made.status();
      if (made.ok()) memory[r][which] = *std::move(made);
    });
  };
  const auto check = [&](std::vector<size_t> which) {
    group.Run([&](ProcessGroup& g, size_t r) {
      for (const size_t w : which) {
        auto* const data = static_cast<int32_t*>(memory[r][w].data());
        for (size_t i = 0; i < kCount; ++i) data[i] = static_cast<int32_t>(i + 10 * w + r);
      }
      for (const size_t w : which) {
        const Buffer buffer = memory[r][w].View(DType::kInt32, 0, kCount);
        statuses[r] = g.AllReduce(buffer, buffer).Wait();
      }
    });
    for (size_t r = 0; r < 2; ++r) {
      REQUIRE(statuses[r].ok());
      for (const size_t w : which) {
        const auto* const data = static_cast<const int32_t*>(memory[r][w].data());
        for (size_t i = 0; i < kCount; ++i) REQUIRE(data[i] == static_cast<int32_t>(2 * (i + 10 * w) + 1));
      }
    }
  };
  for (size_t w = 0; w < 4; ++w) allocate(w);
  check({0, 1, 2, 3});
  // Freed by one rank each, a number is still in use.
  memory[0][1] = memory[1][2] = Allocation();
  Allocation kept = std::move(memory[1][1]), other = std::move(memory[0][2]);
  allocate(1);
  for (const absl::Status& status : statuses) CHECK(absl::IsResourceExhausted(status));
  kept = Allocation();
  allocate(1);
  REQUIRE(statuses[0].ok());
  check({0, 1, 3});
  other = Allocation();
  for (int round = 0; round < 3; ++round) {
    memory[0][2] = memory[1][2] = Allocation();
    allocate(2);
    REQUIRE(statuses[0].ok());
    check({0, 1, 2, 3});
  }
}

}  // namespace
}  // namespace ddp
