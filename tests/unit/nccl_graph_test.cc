// SPDX-License-Identifier: Apache-2.0
// Operations in graphs of simulated GPUs beside others of the same group, and captures that are given up.
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/nccl_job.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing::simulated {
namespace {

// A program's stream, and an all-reduce on it.
struct Caller {
  explicit Caller(Rank& rank) : owned(rank.MakeStream()), stream{rank.device(), owned.get()} {}
  Work Sum(ProcessGroup& group, const Array& a) const { return group.AllReduce(a.whole(), a.whole(), {}, stream); }
  std::shared_ptr<FakeGraph> Capture(ProcessGroup& group, const Array& a) const {
    RANK_CHECK_OK(FakeDevices::BeginCapture(owned.get()));
    RANK_CHECK_OK(Sum(group, a).BlockStream(stream));
    return RANK_VALUE(FakeDevices::EndCapture(owned.get()));
  }
  const OwnedStream owned;
  const Stream stream;
};

// Nothing waits for anything else in the program, and all use what the group has once. (NCCL sees to it itself; the
// simulated one does not.)
TEST_CASE("replays of graphs and other operations take turns") {
  for (const size_t count : {size_t{3000}, size_t{200'000}}) {
    Job job(2);
    if (!job.staged && PeerLimitsOfTest().from == PeerLimits::kNever) return;
    job.gpus.late = [](int, int) { return false; };
    job.Run([&](Rank& rank, ProcessGroup& group) {
      const Caller one(rank), two(rank), three(rank);
      Array a(rank, group, DType::kInt32, count, false), b(rank, group, DType::kInt32, count, false),
          c(rank, group, DType::kInt32, count, false);
      const auto fill = [&](const Caller& by, const Array& array, int value) {
        FakeDevices::Enqueue(by.owned.get(), [to = static_cast<int*>(array.whole().data), count, value] {
          std::fill_n(to, count, value);
        });
      };
      RANK_CHECK_OK(one.Sum(group, a).Wait());
      const std::shared_ptr<FakeGraph> graph = one.Capture(group, a), other = three.Capture(group, c);
      for (int round = 0; round < 20; ++round) {
        fill(one, a, rank.rank + 1);
        fill(two, b, 10 * rank.rank);
        fill(three, c, 100 * rank.rank);
        FakeDevices::Launch(graph, one.owned.get());
        if (round % 2 == 0) FakeDevices::Launch(other, three.owned.get());
        Work first = two.Sum(group, b);
        if (round % 2 == 1) FakeDevices::Launch(other, three.owned.get());
        FakeDevices::Launch(graph, one.owned.get());
        RANK_CHECK_OK(group.Barrier().Wait());
        RANK_CHECK_OK(first.Wait());
        FakeDevices::Synchronize(one.owned.get());
        FakeDevices::Synchronize(three.owned.get());
        for (const size_t i : {size_t{0}, count / 2, count - 1}) {
          RANK_CHECK_EQ(a.Get(i), 6);
          RANK_CHECK_EQ(b.Get(i), 10);
          RANK_CHECK_EQ(c.Get(i), 100);
        }
      }
    });
  }
}

TEST_CASE("a graph is watched although a capture before it was given up") {
  Job job(2);
  job.timeout = absl::Seconds(2);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const Caller caller(rank);
    Array a(rank, group, DType::kInt32, 100, false);
    RANK_CHECK_OK(caller.Sum(group, a).Wait());
    RANK_CHECK_OK(FakeDevices::BeginCapture(caller.owned.get()));
    RANK_CHECK_OK(caller.Sum(group, a).call_status());
    RANK_CHECK(!FakeDevices::EndCapture(caller.owned.get()).ok(), "what was not joined was captured");
    const std::shared_ptr<FakeGraph> graph = caller.Capture(group, a);
    if (rank.rank == 0) FakeDevices::Launch(graph, caller.owned.get());
    if (rank.rank == 0) FakeDevices::RunEarly(caller.owned.get());
    while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    RANK_CHECK_STATUS(group.status(), absl::StatusCode::kDeadlineExceeded, "rank 1 has not launched its graph");
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
