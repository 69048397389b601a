// SPDX-License-Identifier: Apache-2.0
// Groups of part of the ranks over simulated GPUs, and what is made of a group's operations.
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "ddp/collectives.h"
#include "ddp/context.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

constexpr absl::StatusCode kAborted = absl::StatusCode::kAborted;

TEST_CASE("one rank alone needs no NCCL", "[nccl]") {
  Job job(3);
  job.Run([](Rank& rank, ProcessGroup& group) {
    std::unique_ptr<ProcessGroup> own = RANK_VALUE(group.Split(rank.rank == 0 ? 0 : 1, 0));
    RANK_CHECK_EQ(std::string(own->backend()), rank.rank == 0 ? "local" : "nccl");
    Array a(rank, *own, DType::kFloat32, 1001, true);
    a.Set(1000, 4);
    RANK_CHECK_OK(own->AllReduce(a.Cut(1), a.Cut(1), {.op = ReduceOp::kAvg}, kNoStream).Wait());
    RANK_CHECK_EQ(a.Get(1000), 4.0);
    RANK_CHECK_OK(group.Barrier().Wait());
  });
  CHECK(job.nccl.live_comms() == 0);
}

TEST_CASE("GPUs of several hosts may have equal names", "[nccl]") {
  for (int hosts : {2, 4}) {
    Job job(4);
    job.hosts = hosts;
    job.Run([&](Rank& rank, ProcessGroup& group) {
      const size_t n = 4, r = static_cast<size_t>(rank.rank);
      Array a(rank, group, DType::kInt32, 10, true), all(rank, group, DType::kInt32, 10 * n, false);
      for (size_t i = 0; i < 10; ++i) a.Set(i, static_cast<double>(100 * r + i));
      RANK_CHECK_OK(group.AllGather(a.Cut(1), all.Cut(1), kNoStream).Wait());
      for (size_t i = 0; i < 10 * n; ++i) RANK_CHECK_EQ(all.Get(i), static_cast<double>(100 * (i / 10) + i % 10));
      RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(2), {}, kNoStream).Wait());
      for (size_t i = 0; i < 10; ++i) RANK_CHECK_EQ(a.Get(i), static_cast<double>(600 + 4 * i));
      RANK_CHECK_OK(group.ReduceScatter(all.Cut(1), a.Cut(1), {}, kNoStream).Wait());
      for (size_t i = 0; i < 10; ++i) RANK_CHECK_EQ(a.Get(i), static_cast<double>(4 * (100 * r + i)));
      RANK_CHECK_OK(group.Broadcast(a.Cut(1), 3, kNoStream).Wait());
      RANK_CHECK_EQ(a.Get(1), 1204.0);
      RANK_CHECK_OK(group.AllToAll(all.Cut(1), all.Cut(1), kNoStream).Wait());
      for (size_t i = 0; i < 10 * n; ++i) RANK_CHECK_EQ(all.Get(i), static_cast<double>(100 * r + i % 10));
      // Across the hosts, and on each of them.
      for (const int color : {rank.rank % 2, rank.rank / 2}) {
        const std::unique_ptr<ProcessGroup> part = RANK_VALUE(group.Split(color, 0));
        a.Set(0, 1);
        RANK_CHECK_OK(part->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
        RANK_CHECK_EQ(a.Get(0), 2.0);
      }
      RANK_CHECK_OK(group.Barrier().Wait());
    });
    CHECK(job.nccl.live_comms() == 0);
  }
  Job job(4);  // ... but not of one
  job.hosts = 2;
  job.Expect(absl::StatusCode::kFailedPrecondition, {"ranks 2 and 3 use the same GPU, fake:1;"},
             [](NcclGroupOptions& o, int rank) { o.device.index = rank == 2 ? 3 : o.device.index; });
}

TEST_CASE("a rank that sees one GPU alone takes it, whatever its local rank is", "[nccl]") {
  FakeDevices& gpus = KeptDevices(1);
  const ScopedDevices devices(gpus);
  setenv("DDP_NCCL_LIBRARY", "/there/is/none", 1);  // which is looked for once the GPU is there
  const std::shared_ptr<Store> store = CreateMemoryStore();
  std::vector<std::string> errors(2);
  const auto run = [&](int rank) {
    ContextOptions options;
    options.rank = rank;
    options.world_size = options.local_world_size = 2;
    options.local_rank = 1 - rank;
    options.store = store;
    options.backend = "nccl";
    options.device = {Device::Kind::kCuda, -1};
    errors[static_cast<size_t>(rank)] = std::string(Context::Create(options).status().message());
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  unsetenv("DDP_NCCL_LIBRARY");
  for (const std::string& error : errors) {
    INFO(error);
    CHECK(absl::StrContains(error, "NCCL"));
    CHECK_FALSE(absl::StrContains(error, "is asked for"));
  }
}

TEST_CASE("one rank gets or gives the whole, whichever it is") {
  const int version = GENERATE(22803, 22809);  // of which the first cannot sum several registered ranges in one group
  for (const int size : {1, 3}) {
    Job job(size, version);
    job.Run([](Rank& rank, ProcessGroup& group) {
      constexpr size_t kPart = 10;
      const size_t n = static_cast<size_t>(rank.size), me = static_cast<size_t>(rank.rank);
      const auto value = [](size_t r, size_t i) { return static_cast<double>(100 * r + i); };
      for (const bool allocated : {false, true}) {
        for (const size_t pieces : {size_t{1}, size_t{3}}) {
          for (int root = 0; root < rank.size; ++root) {
            const bool here = rank.rank == root;
            Array part(rank, group, DType::kInt32, kPart, allocated);
            Array whole(rank, group, DType::kInt32, kPart * n, allocated),
                sum(rank, group, DType::kInt32, kPart, false);
            for (size_t i = 0; i < kPart; ++i) part.Set(i, value(me, i));
            const std::vector<Buffer> wholes = here ? whole.Cut(pieces + 1) : std::vector<Buffer>();
            Work gathered = group.Gather(part.Cut(pieces), wholes, root, kNoStream);
            // Behind the gather in the stream's order; each rank takes its part back from the whole.
            Work summed =
                group.Reduce(part.Cut(pieces), here ? sum.Cut(pieces + 1) : std::vector<Buffer>(), root, {}, kNoStream);
            RANK_CHECK_OK(gathered.Wait());
            RANK_CHECK_OK(summed.Wait());
            for (size_t k = 0; here && k < kPart * n; ++k) RANK_CHECK_EQ(whole.Get(k), value(k / kPart, k % kPart));
            double ranks = 0;
            for (size_t r = 0; r < n; ++r) ranks += static_cast<double>(100 * r);
            for (size_t i = 0; here && i < kPart; ++i) {
              RANK_CHECK_EQ(sum.Get(i), ranks + static_cast<double>(n * i));
            }
            for (size_t i = 0; i < kPart; ++i) part.Set(i, -1);
            RANK_CHECK_OK(group.Scatter(wholes, part.Cut(pieces), root, kNoStream).Wait());
            for (size_t i = 0; i < kPart; ++i) RANK_CHECK_EQ(part.Get(i), value(me, i));
            // In place.
            const Buffer all = whole.whole();
            const Buffer own{static_cast<int32_t*>(all.data) + me * kPart, kPart, all.dtype, all.device};
            const Buffer mine = here ? own : part.whole();
            RANK_CHECK_OK(group.Gather(mine, all, root, kNoStream).Wait());
            RANK_CHECK_OK(group.Scatter(all, mine, root, kNoStream).Wait());
            for (size_t k = 0; here && k < kPart * n; ++k) RANK_CHECK_EQ(whole.Get(k), value(k / kPart, k % kPart));
          }
        }
      }
    });
  }
}

TEST_CASE("a reduction to one rank scales, converts and looks like one to all") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    for (const bool allocated : {false, true}) {
      for (const DType in : {DType::kFloat32, DType::kBFloat16}) {
        for (const DType out : {DType::kFloat32, DType::kFloat16}) {
          Array a(rank, group, in, 5, allocated), b(rank, group, out, 5, allocated);
          Array word(rank, group, DType::kInt32, 1, false);
          for (size_t i = 0; i < 5; ++i) a.Set(i, static_cast<double>(2 * i) + rank.rank);
          ReduceOptions options{.op = ReduceOp::kAvg, .prescale = 2, .postscale = 4};
          options.nonfinite = static_cast<uint32_t*>(word.whole().data);
          for (const bool bad : {false, true}) {
            if (bad && rank.rank == 0) a.Set(4, HUGE_VAL);
            RANK_CHECK_OK(group.Reduce(a.whole(), b.whole(), 1, options, kNoStream).Wait());
            if (rank.rank == 1) {
              RANK_CHECK_EQ(b.Get(3), 8 * 6.5);
              RANK_CHECK_EQ(word.Get(0), bad ? 1.0 : 0.0);
            }
          }
        }
      }
    }
    Array a(rank, group, DType::kFloat32, 10, false);
    RANK_CHECK_STATUS(group.Reduce(a.whole(), {}, rank.rank, {}, kNoStream), absl::StatusCode::kInvalidArgument,
                      absl::StrCat("rank ", rank.rank, ": reduce"), "no out buffers");
    RANK_CHECK_STATUS(group.Gather(a.whole(), a.whole(), 5, kNoStream), absl::StatusCode::kInvalidArgument, "gather",
                      "root 5");
    const Buffer other{a.whole().data, rank.rank == 0 ? 10u : 9u, DType::kFloat32, rank.device()};
    absl::Status reduced = group.Reduce(other, other, 0, {}, kNoStream).Wait();
    // A rank that only sends need not wait for the root, and learns of it at its next call.
    if (rank.rank == 1 && reduced.ok()) reduced = group.AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait();
    RANK_CHECK_STATUS(reduced, absl::StatusCode::kFailedPrecondition, "reduce(sum, to rank 0, float32, 9 elements)");
  });
}

TEST_CASE("uneven parts on GPUs") {
  Job job(3);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const size_t n = 3, me = static_cast<size_t>(rank.rank);
    const auto given = [](size_t s, size_t r) { return (2 * s + 3 * r) % 4 * 5; };
    for (const bool allocated : {false, true}) {
      for (const size_t pieces : {size_t{1}, size_t{2}}) {
        std::vector<size_t> sends, receives, counts = {7, 0, 20};
        for (size_t r = 0; r < n; ++r) sends.push_back(given(me, r)), receives.push_back(given(r, me));
        const auto total = [](const std::vector<size_t>& c) { return std::accumulate(c.begin(), c.end(), size_t{0}); };
        Array in(rank, group, DType::kInt32, 64, allocated), out(rank, group, DType::kInt32, 64, allocated);
        const auto part = [&](const Array& array, size_t count) {
          Buffer b = array.whole();
          b.count = count / pieces;
          std::vector<Buffer> cut = {b};
          if (pieces > 1) cut.push_back({static_cast<int32_t*>(b.data) + b.count, count - b.count, b.dtype, b.device});
          return cut;
        };
        for (size_t r = 0, at = 0; r < n; ++r) {
          for (size_t i = 0; i < sends[r]; ++i) in.Set(at++, static_cast<double>(1000 * me + 100 * r + i));
        }
        RANK_CHECK_OK(
            group.AllToAll(part(in, total(sends)), sends, part(out, total(receives)), receives, kNoStream).Wait());
        for (size_t r = 0, at = 0; r < n; ++r) {
          for (size_t i = 0; i < receives[r]; ++i) {
            RANK_CHECK_EQ(out.Get(at++), static_cast<double>(1000 * r + 100 * me + i));
          }
        }
        for (size_t i = 0; i < 27; ++i) in.Set(i, static_cast<double>(10 * me + i));
        RANK_CHECK_OK(group.ReduceScatter(part(in, 27), part(out, counts[me]), counts, {}, kNoStream).Wait());
        for (size_t i = 0; i < counts[me]; ++i) {
          RANK_CHECK_EQ(out.Get(i), static_cast<double>(30 + 3 * (i + (me == 2 ? 7 : 0))));
        }
      }
    }
  });
}

// As single calls these would wait for each other for ever: every rank sends first.
TEST_CASE("a ring of messages on GPUs needs no order among the ranks") {
  Job job(3);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const int next = (rank.rank + 1) % 3, before = (rank.rank + 2) % 3;
    for (const bool allocated : {false, true}) {
      Array in(rank, group, DType::kFloat32, 1000, allocated), out(rank, group, DType::kFloat32, 1000, false);
      for (size_t i = 0; i < 1000; ++i) in.Set(i, rank.rank);
      RANK_CHECK_OK(group.SendRecv(in.Cut(2), next, out.Cut(3), before, 1, kNoStream).Wait());
      RANK_CHECK_EQ(out.Get(999), before);
      RANK_CHECK_OK(group.SendRecv(in.whole(), before, out.whole(), next, 1, kNoStream).Wait());
      RANK_CHECK_EQ(out.Get(999), next);
    }
  });
}

TEST_CASE("groups that are split off work for themselves") {
  Job job(4);
  job.Run([](Rank& rank, ProcessGroup& group) {
    std::unique_ptr<ProcessGroup> half = RANK_VALUE(group.Split(rank.rank == 3 ? -1 : rank.rank % 2, 0));
    RANK_CHECK_EQ(half == nullptr, rank.rank == 3);
    if (half != nullptr) {
      Array a(rank, *half, DType::kInt32, 3, true);
      a.Set(0, 1);
      RANK_CHECK_OK(half->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
      RANK_CHECK_EQ(a.Get(0), rank.rank == 1 ? 1 : 2);
    }
    RANK_CHECK_OK(group.Barrier().Wait());  // nobody aborts what another has not seen finished
    if (half != nullptr) {
      Array a(rank, *half, DType::kInt32, 3, false);
      half->Abort(absl::InternalError("done with it"));
      RANK_CHECK_STATUS(half->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait(), kAborted, "done with it");
    }
    Array b(rank, group, DType::kInt32, 1, false);
    RANK_CHECK_OK(group.AllReduce(b.Cut(1), b.Cut(1), {}, kNoStream).Wait());
  });
}

TEST_CASE("a world and its parts work at once, each from a thread of its own") {
  Job job(3);
  job.Run([](Rank& rank, ProcessGroup& group) {
    std::unique_ptr<ProcessGroup> all = RANK_VALUE(group.Split(0, 0));
    std::unique_ptr<ProcessGroup> some = RANK_VALUE(group.Split(rank.rank == 0 ? 0 : 1, 0));
    const auto work = [&rank](ProcessGroup& mine, double seed, std::string* failure) {
      try {
        const double n = mine.size();
        Array a(rank, mine, DType::kInt32, 500, false),
            gathered(rank, mine, DType::kInt32, 500 * static_cast<size_t>(n), false);
        for (int round = 0; round < 30; ++round) {
          for (size_t i = 0; i < 500; ++i) a.Set(i, mine.rank() + seed + round);
          RANK_CHECK_OK(mine.AllReduce(a.Cut(1), a.Cut(2), {}, kNoStream).Wait());
          for (size_t i = 0; i < 500; ++i) RANK_CHECK_EQ(a.Get(i), n * (n - 1) / 2 + n * (seed + round));
          a.Set(0, mine.rank());
          RANK_CHECK_OK(mine.AllGather(a.Cut(1), gathered.Cut(1), kNoStream).Wait());
          for (size_t r = 0; r < static_cast<size_t>(n); ++r) {
            RANK_CHECK_EQ(gathered.Get(500 * r), static_cast<double>(r));
          }
        }
      } catch (const std::exception& e) {
        *failure = e.what();
        mine.Abort(absl::InternalError(*failure));
      }
    };
    std::string failures[3];
    std::thread first([&] { work(*all, 1000, &failures[0]); }), second([&] { work(*some, 2000, &failures[1]); });
    work(group, 3000, &failures[2]);
    first.join();
    second.join();
    for (const std::string& failure : failures) RANK_CHECK(failure.empty(), failure);
    RANK_CHECK_OK(group.Barrier().Wait());
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
