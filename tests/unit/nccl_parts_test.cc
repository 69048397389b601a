// Groups of part of the ranks over simulated GPUs, and what is made of a group's operations.
#include <cstdlib>
#include <exception>
#include <memory>
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

TEST_CASE("one rank alone needs no NCCL") {
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

TEST_CASE("GPUs of several hosts may have equal names") {
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
             [](DeviceGroupOptions& o, int rank) { o.device.index = rank == 2 ? 3 : o.device.index; });
}

TEST_CASE("a rank that sees one GPU alone takes it, whatever its local rank is") {
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

TEST_CASE("operations of ddp/collectives.h refuse GPU memory on all ranks alike") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kFloat32, 10, false), b(rank, group, DType::kFloat32, 20, false);
    for (const int root : {0, 1}) {
      RANK_CHECK_STATUS(Reduce(group, a.Cut(1), a.Cut(1), root), absl::StatusCode::kInvalidArgument, "reduce",
                        "CPU memory", absl::StrCat("rank ", rank.rank));
      RANK_CHECK_STATUS(Gather(group, a.Cut(1), b.Cut(1), root), absl::StatusCode::kInvalidArgument, "gather");
      RANK_CHECK_STATUS(Scatter(group, b.Cut(1), a.Cut(1), root), absl::StatusCode::kInvalidArgument, "scatter");
    }
    RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());  // nothing has stuck
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
