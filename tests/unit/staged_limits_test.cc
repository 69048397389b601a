// SPDX-License-Identifier: Apache-2.0
// Where all-reduces through host memory take another way: what is said, what is measured, and what follows from it.
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "libddp/comm/staged/staged_calibration.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

using staged::Move;

TEST_CASE("limits are read as they are meant") {
  StagedLimits limits = StagedLimits::For(2);
  CHECK(limits.Parse("").ok());
  CHECK(limits.Parse("fixed").ok());
  CHECK(limits.Parse("measure").ok());
  CHECK(limits == StagedLimits::For(2));
  REQUIRE(limits.Parse("packets=3,packets_once=2,once=64K,copies=2M,chunk=512K,tile=4K,blocks=24").ok());
  CHECK(limits == StagedLimits{3, 2, 64 << 10, 2 << 20, 512 << 10, 512 << 10, 4 << 10, 24});
  REQUIRE(limits.Parse("copies=never,packets=never,packets_once=never").ok());
  CHECK(limits.copies == StagedLimits::kNever);
  CHECK(limits.packets == 0);
  CHECK(limits.packets_once == 0);
  for (const char* const wrong : {"copy=3", "copies", "copies=", "copies=-1", "copies=1G", "copies=3,chunk=1000",
                                  "chunk=0", "chunk=2000M", "chunk=never", "tile=2K", "tile=65K", "4M"}) {
    const absl::Status status = limits.Parse(wrong);
    INFO(wrong << ": " << status.message());
    CHECK(absl::IsInvalidArgument(status));
    CHECK(absl::StrContains(status.message(), wrong));
  }
}

TEST_CASE("the way of an all-reduce follows from the limits") {
  StagedLimits limits = StagedLimits::For(2);
  REQUIRE(limits.Parse("packets=1K,packets_once=64,once=1M,copies=8M").ok());
  for (const auto& [bytes, move] :
       std::vector<std::pair<uint64_t, Move>>{{4, Move::kAllReducePacketsOnce},
                                              {64, Move::kAllReducePacketsOnce},
                                              {65, Move::kAllReducePackets},
                                              {1024, Move::kAllReducePackets},
                                              {1025, Move::kAllReduceOnce},
                                              {1 << 20, Move::kAllReduceOnce},
                                              {(1 << 20) + 1, Move::kAllReduce},
                                              {(8 << 20) - 1, Move::kAllReduce},
                                              {8 << 20, Move::kAllReduceFetched},
                                              {uint64_t{1} << 40, Move::kAllReduceFetched}}) {
    INFO(bytes << " bytes");
    CHECK(AllReduceMove(limits, 2, 48, bytes, 1, 1) == move);
  }
  // Results have room in packets, too.
  CHECK(AllReduceMove(limits, 2, 48, 16, 2, 4) == Move::kAllReducePacketsOnce);
  CHECK(AllReduceMove(limits, 2, 48, 32, 2, 4) == Move::kAllReducePackets);
  CHECK(AllReduceMove(limits, 2, 48, 512, 2, 4) == Move::kAllReduceOnce);
  // What one channel's packets hold: of 8 bytes one element each, of 4 three.
  limits.packets = StagedLimits::kNever;
  for (const auto& [size, each] : {std::pair(8, 1), std::pair(4, 3), std::pair(2, 6), std::pair(1, 12)}) {
    const uint64_t most = staged::kPackets * static_cast<uint64_t>(each), element = static_cast<uint64_t>(size);
    CHECK(AllReduceMove(limits, 2, 1, most, element, 1) == Move::kAllReducePackets);
    CHECK(AllReduceMove(limits, 2, 1, most + 1, 1, element) == Move::kAllReduceOnce);
  }
}

TEST_CASE("where nobody measures, only more than two ranks take two phases") {
  const auto move = [](int ranks, uint64_t bytes) {
    return AllReduceMove(StagedLimits::For(ranks), ranks, 48, bytes, 1, 1);
  };
  CHECK(move(2, 256 << 10) == Move::kAllReducePacketsOnce);
  CHECK(move(2, 1 << 20) == Move::kAllReduceOnce);
  for (const int ranks : {3, 4, 8, 16}) {
    INFO(ranks << " ranks");
    CHECK(move(ranks, 4 << 10) == Move::kAllReducePacketsOnce);
    CHECK(move(ranks, 128 << 10) == Move::kAllReducePackets);
    CHECK(move(ranks, 256 << 10) == Move::kAllReduce);
    CHECK(move(ranks, 256 << 20) == Move::kAllReduce);
  }
}

TEST_CASE("chunks grow with the array, up to what there is memory for") {
  StagedLimits limits = StagedLimits::For(2);
  uint64_t before = 0;
  for (uint64_t bytes = 1; bytes < uint64_t{1} << 40; bytes = bytes * 3 + 1) {
    const uint64_t chunk = ChunkOf(limits, bytes);
    CHECK(chunk >= std::max(before, limits.least_chunk));
    CHECK(chunk <= limits.chunk);
    CHECK(chunk % 4096 == 0);
    before = chunk;
  }
  CHECK(before == limits.chunk);
  REQUIRE(limits.Parse("chunk=12K").ok());
  CHECK(ChunkOf(limits, 1) == 12 << 10);
  CHECK(ChunkOf(limits, 1 << 30) == 12 << 10);
}

TEST_CASE("the limit is where the other way is faster for good") {
  CHECK(FasterFrom({{1, 2, 1}, {2, 2, 1}}) == 1);
  CHECK(FasterFrom({{1, 2, 1}, {2, 1, 2}, {4, 3, 2}, {8, 9, 3}}) == 4);
  CHECK(FasterFrom({{1, 2, 1}, {2, 1, 1}}) == StagedLimits::kNever);
}

// What a rank measures, one time after the other.
StagedLimits Calibrated(int ranks, const std::function<double(int number)>& us) {
  StagedJob job(ranks);
  job.gpus.elapsed_us = [&] {
    thread_local int number = 0;
    return us(number++);
  };
  std::vector<StagedLimits> found(static_cast<size_t>(ranks));
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    StagedLimits limits = StagedLimits::For(rank.size);
    const bool with_copies = limits.copies != StagedLimits::kNever;
    const std::shared_ptr<StagingRing> ring = RANK_VALUE(StagingRing::Create(
        *control, rank.gpus, rank.device(), -1, StagedCopies::Shared(rank.size, with_copies ? limits.chunk : 0)));
    std::shared_ptr<StagedCopies> copies;
    if (with_copies) copies = RANK_VALUE(StagedCopies::Create(ring, rank.gpus, rank.device(), limits.chunk));
    RANK_CHECK_OK(CalibrateStaged(*control, rank.Options(), *ring, copies.get(), 16, &limits));
    found[static_cast<size_t>(rank.rank)] = limits;
  });
  for (const StagedLimits& limits : found) CHECK(limits == found[0]);
  return found[0];
}

TEST_CASE("what is measured sets the limits, alike on all ranks") {
  // The way for larger arrays, every second time, is faster.
  const StagedLimits early = Calibrated(2, [](int number) { return number % 2 == 0 ? 10.0 : 5.0; });
  CHECK(early.packets == (16 << 10) - 1);
  CHECK(early.packets_once == StagedLimits::kNever);
  CHECK(early.copies == 2 << 20);
  CHECK(Calibrated(4, [](int number) { return number % 2 == 0 ? 10.0 : 5.0; }).packets_once == (8 << 10) - 1);
  const StagedLimits late = Calibrated(3, [](int number) { return number % 2 == 0 ? 5.0 : 10.0; });
  CHECK(late.packets == 256 << 10);
  CHECK(late.packets_once == 64 << 10);
  CHECK(late.once == 512 << 10);
  CHECK(late.copies == StagedLimits::kNever);
}

TEST_CASE("a rank that cannot measure is named by all, and nobody waits for it") {
  StagedJob job(2);
  job.staged_limits = "measure";
  std::atomic<int> runs{0};
  job.gpus.fail = [&](absl::string_view call, int device) {
    return call == "RunStaged" && device == 1 && ++runs > 5 ? absl::InternalError("a broken GPU") : absl::OkStatus();
  };
  job.Expect(absl::StatusCode::kInternal, {"rank 1", "a broken GPU"});
}

TEST_CASE("limits that cannot be read are an error of every rank") {
  StagedJob job(2);
  job.staged_limits = "copies=often";
  job.Expect(absl::StatusCode::kInvalidArgument, {"DDP_STAGED_LIMITS", "copies=often"});
}

TEST_CASE("without memory for copies, kernels do everything") {
  StagedJob job(2);
  job.gpus.allow = [](Device device, size_t bytes) {
    return device.index == 1 && bytes > 16 << 20 ? absl::ResourceExhaustedError("cudaMalloc: full") : absl::OkStatus();
  };
  job.Run([](Rank& rank, ProcessGroup& group) {
    constexpr size_t kCount = 3 << 20;  // 12 MiB
    Array a(rank, group, DType::kFloat32, kCount, false);
    for (size_t i = 0; i < kCount; i += 1000) a.Set(i, rank.rank + 1);
    RANK_CHECK_OK(group.AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait());
    for (size_t i = 0; i < kCount; i += 1000) RANK_CHECK_EQ(a.Get(i), 3);
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
