// SPDX-License-Identifier: Apache-2.0
// CUDA graphs on real GPUs whose operations fail, or whose group has gone.
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "tests/gpu/on_gpus.h"
#include "tests/support/catch.h"

namespace ddp::testing {
namespace {

TEST_CASE("a rank that does not launch its graph is named when time is out") {
  if (RankCount() < 2) return;
  ContextOptions options = OnGpus();
  options.timeout = absl::Seconds(5);
  RunOnGpus(
      [](Rank& rank) {
        const CallerStream stream(rank);
        Array a(rank, DType::kInt32, 1000, false);  // plain memory: see docs/gpu-verification.md
        RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
        a.Fill([](size_t) { return 1; });
        const CapturedGraph graph(stream, [&] {
          RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, stream.get()).BlockStream(stream.get()));
        });
        for (int launch = 0; launch < 2; ++launch) graph.Launch(stream);
        stream.Wait();
        a.Expect([&](size_t) { return rank.size() * rank.size(); });
        rank.Meet();
        const bool missing = rank.rank() == 1;
        if (!missing) graph.Launch(stream);
        while (rank.group().status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        RANK_CHECK_STATUS(rank.group().status(), absl::StatusCode::kDeadlineExceeded,
                          "rank 1 has not launched its graph", "DDP_TIMEOUT");
        RANK_CHECK(FailedRanks(rank.group().status()) == std::vector<int>{1});
        stream.Wait();  // the abort has released it
        rank.Meet();
      },
      options);
}

TEST_CASE("a graph that is launched when its group has gone finds the group's word set") {
  RunOnGpus([](Rank& rank) {
    const CallerStream stream(rank);
    Array a(rank, DType::kInt32, 1000, false), word(rank, DType::kInt32, 1, false);
    std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.group().Split(0, 0));
    RANK_CHECK_OK(group->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
    const CapturedGraph graph(stream, [&] {
      RANK_CHECK_OK(group->AllReduce(a.Cut(1), a.Cut(1), {}, stream.get()).BlockStream(stream.get()));
      GPU(cudaMemcpyAsync(word.data(), group->failed_word(), 4, cudaMemcpyDefault, stream.native()));
    });
    graph.Launch(stream);
    stream.Wait();
    word.Expect([](size_t) { return 0; });
    rank.Meet();
    group.reset();
    graph.Launch(stream);
    stream.Wait();
    word.Expect([](size_t) { return 1; });
    rank.Meet();
  });
}

// Nothing waits for anything else in the program, and all use what the group has once.
TEST_CASE("replays of graphs and other operations of a group take turns") {
  RunOnGpus([](Rank& rank) {
    for (const size_t count : {size_t{1000}, size_t{300'000}}) {
      const CallerStream one(rank), two(rank), three(rank);
      Array a(rank, DType::kInt32, count, false), b(rank, DType::kInt32, count, false),
          c(rank, DType::kInt32, count, false);
      RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
      const CapturedGraph graph(one, [&] {
        RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, one.get()).BlockStream(one.get()));
      });
      const CapturedGraph other(three, [&] {
        RANK_CHECK_OK(rank.group().AllReduce(c.Cut(1), c.Cut(1), {}, three.get()).BlockStream(three.get()));
      });
      for (int round = 0; round < 30; ++round) {
        a.Fill([](size_t) { return 1; });
        b.Fill([&](size_t i) { return static_cast<int>(i % 7) + round; });
        c.Fill([&](size_t i) { return static_cast<int>(i % 11) + round; });
        for (int launch = 0; launch < 2; ++launch) {
          graph.Launch(one);
          other.Launch(three);
          RANK_CHECK_OK(
              rank.group().AllReduce(b.Cut(1), b.Cut(1), {}, launch == 0 ? one.get() : two.get()).call_status());
        }
        RANK_CHECK_OK(rank.group().Barrier().Wait());
        one.Wait();
        three.Wait();
        const int squared = rank.size() * rank.size();
        a.Expect([&](size_t) { return squared; });
        b.Expect([&](size_t i) { return (static_cast<int>(i % 7) + round) * squared; });
        c.Expect([&](size_t i) { return (static_cast<int>(i % 11) + round) * squared; });
      }
    }
  });
}

}  // namespace
}  // namespace ddp::testing
