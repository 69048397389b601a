// SPDX-License-Identifier: Apache-2.0
// How kernels of the hierarchical backend leave when a group fails, ends or cannot be made.
#include <cstddef>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/failed_ranks.h"
#include "tests/support/gpu_results.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

constexpr absl::StatusCode kAborted = absl::StatusCode::kAborted;
constexpr char kCopies[] = "copies=0,chunk=4K";

TEST_CASE("Abort releases whoever waits, and the device knows it first") {
  for (const auto& [who, limits] :
       {std::pair(0, "fixed"), std::pair(1, "fixed"), std::pair(0, kCopies), std::pair(1, kCopies)}) {
    const int aborter = who;  // clang 14 captures no structured binding
    StagedJob job(2, limits);
    std::atomic<bool> waiting{false};
    std::atomic<int> met{0};
    job.Run([&](Rank& rank, ProcessGroup& group) {
      const OwnedStream stream = rank.MakeStream();
      const Stream mine{rank.device(), stream.get()};
      Array a(rank, group, DType::kFloat32, 1 << 20, false), skip(rank, group, DType::kInt32, 1, false);
      RANK_CHECK_OK(group.Barrier().Wait());
      for (++met; met < 2;) std::this_thread::yield();
      if (rank.rank == 0) {  // nobody comes
        Work work = group.AllReduce(a.whole(), a.whole(), {}, mine);
        RANK_CHECK_OK(work.BlockStream(mine));
        Commit(rank, group, skip, stream);
        RANK_CHECK(!work.Done());
        waiting = true;
        if (aborter == 0) group.Abort(absl::InternalError("enough"));
        RANK_CHECK_STATUS(work.Wait(), kAborted, "enough", absl::StrCat("rank ", aborter));
        FakeDevices::Synchronize(stream.get());
        RANK_CHECK_EQ(skip.Get(0), 1);
      } else {
        while (!waiting) std::this_thread::yield();
        if (aborter == 1) group.Abort(absl::InternalError("enough"));
        while (group.status().ok()) std::this_thread::yield();
      }
      RANK_CHECK_STATUS(group.AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait(), kAborted, "enough");
    });
  }
}

TEST_CASE("a group that is destroyed in the middle of an operation ends it") {
  const bool copies = GENERATE(false, true);
  StagedJob job(2, copies ? kCopies : "fixed");
  CheckEndsWithItsGroup(job);
}

TEST_CASE("a rank that is gone is named, and its peers' GPUs come free") {
  const bool copies = GENERATE(false, true);
  StagedJob job(3, copies ? kCopies : "fixed");
  job.RunOver([](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateStagedGroup(std::move(control), rank.Options()));
    Array a(rank, *group, DType::kFloat32, 1 << 18, false);
    RANK_CHECK_OK(group->AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait());
    if (rank.rank == 1) return;
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    Work work = group->AllReduce(a.whole(), a.whole(), {}, mine);
    RANK_CHECK_OK(work.BlockStream(mine));
    const absl::Status status = work.Wait();
    RANK_CHECK_STATUS(status, absl::StatusCode::kUnavailable, "rank 1");
    RANK_CHECK(FailedRanks(status) == std::vector<int>{1});
    FakeDevices::Synchronize(stream.get());
  });
}

TEST_CASE("what one rank lacks for a staged group, all ranks are told") {
  const auto expect = [](StagedJob& job, absl::StatusCode code, const std::vector<std::string>& parts) {
    job.Expect(code, parts);
  };
  StagedJob no_memory(3);
  no_memory.gpus.fail = [](absl::string_view call, int device) {
    return call == "Allocate" && device == 2 ? absl::ResourceExhaustedError("cudaMalloc: full") : absl::OkStatus();
  };
  expect(no_memory, absl::StatusCode::kResourceExhausted, {"rank 2", "cudaMalloc: full"});
  StagedJob not_registered(2);
  not_registered.gpus.fail = [](absl::string_view call, int) {
    return call == "RegisterHost" ? absl::ResourceExhaustedError("cudaHostRegister: no") : absl::OkStatus();
  };
  expect(not_registered, absl::StatusCode::kResourceExhausted, {"cudaHostRegister: no", "memlock", "--shm-size"});
  StagedJob small(4);
  small.gpus.staged_blocks = [](int) { return 40; };
  small.gpus.identity = [](int) { return "fake:0"; };  // all on one
  expect(small, absl::StatusCode::kFailedPrecondition, {"4 ranks of one process share GPU fake:0", "runs 40"});
}

TEST_CASE("ranks that share a GPU divide it") {
  StagedJob job(3);
  job.gpus.identity = [](int) { return "fake:0"; };
  job.gpus.staged_blocks = [](int) { return 40; };  // 13 each
  job.Run([](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kInt32, 500'000, false);
    for (size_t i = 0; i < 500'000; ++i) a.Set(i, 1);
    RANK_CHECK_OK(group.AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait());
    RANK_CHECK_EQ(a.Get(499'999), 3);
  });
}

TEST_CASE("a graph that is launched when its group has gone leaves, and says so") {
  const bool copies = GENERATE(false, true);
  StagedJob job(2, copies ? kCopies : "fixed");
  std::latch gone(2);  // such a launch ends what peers still do
  job.RunOver([&gone](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateStagedGroup(std::move(control), rank.Options()));
    const OwnedStream stream = rank.MakeStream();
    Array a(rank, *group, DType::kInt32, 100'000, false), skip(rank, *group, DType::kInt32, 1, false);
    RANK_CHECK_OK(group->AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait());
    const auto graph = CaptureSum(rank, *group, a.Cut(1), skip, stream);
    FakeDevices::Launch(graph, stream.get());
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(skip.Get(0), 0);
    RANK_CHECK_OK(group->Barrier().Wait());
    group.reset();
    gone.arrive_and_wait();
    if (rank.rank == 1) return;  // its GPU takes no part
    FakeDevices::Launch(graph, stream.get());
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(skip.Get(0), 1);
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
