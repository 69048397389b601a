// SPDX-License-Identifier: Apache-2.0
// Large all-reduces by the copy engines of GPUs that reach each other: when a group does so, what becomes of the memory
// that ranks share, and failures. Results are those of nccl_group_test and others, with DDP_TEST_PEER_COPIES=1.
#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "libddp/comm/peers/peer_memory.h"
#include "tests/support/logged.h"
#include "tests/support/nccl_job.h"
#include "tests/support/variable.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;
using Change = std::function<void(NcclGroupOptions&, int rank)>;

// Runs `body` in groups whose all-reduces go by copy engines, unless `change` or the job sees to it that they do not.
void RunWithCopies(
    Job& job, const std::function<void(Rank&, ProcessGroup&)>& body, const Change& change = [](auto&, int) {}) {
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    NcclGroupOptions options = rank.Options();
    options.peer_copies = {.from = 0, .chunk = 4096, .automatic = false};
    change(options, rank.rank);
    const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateNcclGroup(std::move(control), options));
    body(rank, *group);
  });
}

// A sum that is right; how many of NCCL's all ranks have made for it, at most.
int CallsOfNccl(Rank& rank, ProcessGroup& group, size_t count) {
  Array array(rank, group, DType::kFloat32, count, true);
  for (size_t i = 0; i < count; ++i) array.Set(i, static_cast<double>(i % 100 + static_cast<size_t>(group.rank())));
  const int before = rank.nccl.Calls("AllReduce");
  RANK_CHECK_OK(group.AllReduce(array.whole(), array.whole(), {}, kNoStream).Wait());
  const int calls = rank.nccl.Calls("AllReduce") - before;
  for (size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int r = 0; r < group.size(); ++r) sum += static_cast<double>(i % 100 + static_cast<size_t>(r));
    RANK_CHECK_EQ(array.Get(i), sum);
  }
  return calls;
}

TEST_CASE("sums of any length go through the copy engines in chunks, and NCCL does none of them") {
  for (const int ranks : {2, 3, 4}) {
    Job job(ranks);
    RunWithCopies(job, [](Rank& rank, ProcessGroup& group) {
      for (const size_t count : {1, 63, 64, 65, 1000, 1024, 1025, 5000, 20'000}) {
        RANK_CHECK_EQ(CallsOfNccl(rank, group, count), 0);
      }
    });
  }
}

TEST_CASE("smaller sums are NCCL's, and the largest limit counts") {
  Job job(2);
  RunWithCopies(
      job,
      [](Rank& rank, ProcessGroup& group) {
        RANK_CHECK(CallsOfNccl(rank, group, 999) > 0);
        RANK_CHECK_OK(group.Barrier().Wait());  // no rank is still at the sum before; NCCL's next one is of both
        RANK_CHECK_OK(group.Barrier().Wait());
        RANK_CHECK_EQ(CallsOfNccl(rank, group, 1000), 0);
      },
      [](NcclGroupOptions& options, int rank) { options.peer_copies.from = rank == 0 ? 0 : 4000; });
}

// Whether a group of two ranks leaves all sums to NCCL.
bool LeavesAllToNccl(
    Job& job, const Change& change = [](auto&, int) {}) {
  std::atomic<bool> all{true};
  RunWithCopies(
      job,
      [&](Rank& rank, ProcessGroup& group) {
        if (CallsOfNccl(rank, group, 1000) == 0) all = false;
      },
      change);
  return all;
}

TEST_CASE("all sums are NCCL's where the copy engines cannot be used, or would not pay") {
  SECTION("a rank that does not want them") {
    Job job(2);
    CHECK(LeavesAllToNccl(job, [](NcclGroupOptions& o, int rank) {
      if (rank == 1) o.peer_copies.from = PeerLimits::kNever;
    }));
  }
  SECTION("ranks on two hosts") {
    Job job(2);
    job.hosts = 2;
    CHECK(LeavesAllToNccl(job));
  }
  SECTION("GPUs that do not reach each other") {
    Job job(2);
    job.gpus.linked = [](int device, int other) { return device == other || device == 0; };
    CHECK(LeavesAllToNccl(job));
  }
  SECTION("too little memory on one of them") {
    Job job(2);
    job.gpus.allow = [](Device device, size_t bytes) {
      return device.index == 1 && bytes == DeviceRuntime::kSharedAlign ? absl::ResourceExhaustedError("none is left")
                                                                       : absl::OkStatus();
    };
    CHECK(LeavesAllToNccl(job));
  }
  SECTION("data that arrive wrong") {
    Job job(2);
    job.gpus.garbles = [](int device, int other) { return device == 1 && other == 0; };
    CHECK(LeavesAllToNccl(job));
  }
  SECTION("more ranks than have been measured, unless they are told to") {
    Job job(3);
    CHECK(LeavesAllToNccl(job, [](NcclGroupOptions& o, int rank) { o.peer_copies.automatic = rank == 0; }));
  }
  SECTION("sums that take longer than NCCL's") {
    Job job(2);
    std::atomic<int> asked{0};  // first both ranks about the copies, then about NCCL
    job.gpus.elapsed_us = [&asked] { return asked++ < 2 + 2 ? 130.0 : 100.0; };
    CHECK(LeavesAllToNccl(job, [](NcclGroupOptions& o, int) { o.peer_copies.automatic = true; }));
  }
}

TEST_CASE("a group is not made if NCCL's part of the comparison does not end") {
  Job job(2);
  job.timeout = absl::Seconds(2);
  for (const int rank : {0, 1}) job.nccl.Plan("AllReduce", rank, Mishap::kStuck, nccl::kInternalError, /*skip=*/3);
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    NcclGroupOptions options = rank.Options();
    options.peer_copies = {.from = 0, .chunk = 16 << 20, .automatic = true};
    RANK_CHECK_STATUS(CreateNcclGroup(std::move(control), options).status(), absl::StatusCode::kDeadlineExceeded,
                      "did not end its first all-reduces");
  });
}

TEST_CASE("a rank that cannot start its kernels is not taken for links that change data") {
  for (const int bad : {0, 1}) {
    Job job(2);
    std::atomic<int> kernels{0};
    job.gpus.fail = [&](absl::string_view call, int device) {
      return call == "RunStaged" && device == bad && ++kernels == 2 ? absl::InternalError("no kernel")
                                                                    : absl::OkStatus();
    };
    Logged logged;
    CHECK(LeavesAllToNccl(job));
    CHECK(logged.Count({"arrives changed"}) == 0);
  }
}

TEST_CASE("a rank that ends the group in the middle of a sum releases the others, and their streams") {
  for (const int leaver : {0, 1}) {
    Job job(3);
    std::latch ready(3);  // the sum before is through, and all have their arrays
    RunWithCopies(job, [&, leaver](Rank& rank, ProcessGroup& group) {
      CallsOfNccl(rank, group, 5000);
      Array array(rank, group, DType::kFloat32, 5000, true);
      ready.arrive_and_wait();
      const OwnedStream stream = rank.MakeStream();
      if (rank.rank == leaver) {
        group.Abort(absl::InternalError("enough"));
      } else {
        Work work = group.AllReduce(array.whole(), array.whole(), {}, {rank.device(), stream.get()});
        work.BlockStream({rank.device(), stream.get()}).IgnoreError();  // the end may have come before
        RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kAborted, "enough");
        FakeDevices::Synchronize(stream.get());
      }
    });
  }
}

TEST_CASE("what a rank still does when its peers have gone on without it changes none of their arrays") {
  for (const int late : {0, 1}) {
    Job job(2);
    std::latch ready(2), gone(1), done(1);
    RunWithCopies(job, [&, late](Rank& rank, ProcessGroup& group) {
      constexpr size_t kCount = 5000;
      Array array(rank, group, DType::kFloat32, kCount, true);
      const OwnedStream stream = rank.MakeStream();
      ready.arrive_and_wait();
      if (rank.rank == late) FakeDevices::Enqueue(stream.get(), [&] { gone.wait(); });  // its backward pass
      Work work = group.AllReduce(array.whole(), array.whole(), {}, {rank.device(), stream.get()});
      if (rank.rank != late) {
        group.Abort(absl::InternalError("enough"));
        RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kAborted, "enough");
        FakeDevices::Synchronize(stream.get());
        for (size_t i = 0; i < kCount; ++i) array.Set(i, 7);
        gone.count_down();
        done.wait();
        for (size_t i = 0; i < kCount; ++i) RANK_CHECK_EQ(array.Get(i), 7);
      } else {
        gone.wait();
        work.Wait().IgnoreError();
        RANK_CHECK_OK(AwaitFree(group));
        done.count_down();
      }
    });
  }
}

TEST_CASE("what ranks share is freed when the last one has let go of its group") {
  const auto free_what_is_done = [] {
    for (int gpu = 0; gpu < 4; ++gpu) PeerMemory::FreeWhatIsDone({Device::Kind::kCuda, static_cast<int16_t>(gpu)});
  };
  free_what_is_done();
  const FakeDevices::Held before = FakeDevices::held();
  for (int round = 0; round < 2; ++round) {
    Job job(3);
    RunWithCopies(job, [](Rank& rank, ProcessGroup& group) {
      const std::unique_ptr<ProcessGroup> part = RANK_VALUE(group.Split(rank.rank == 2 ? 1 : 0, rank.rank));
      if (rank.rank != 2) CallsOfNccl(rank, *part, 3000);
      CallsOfNccl(rank, group, 3000);
    });
  }
  free_what_is_done();
  for (int wait = 0; wait < 1000 && !(FakeDevices::held() == before); ++wait) absl::SleepFor(absl::Milliseconds(10));
  CHECK(FakeDevices::held() == before);
}

TEST_CASE("a rank frees the memory of its own GPU alone: another one's may be waiting for it") {
  Job job(2);
  std::latch closed(1), looked(1);
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    const DeviceGuard guard(rank.gpus, rank.device());
    StagingRing::Beside beside;
    beside.common = 4096;
    beside.only_words = true;
    const auto ring = RANK_VALUE(StagingRing::Create(*control, rank.gpus, rank.device(), -1, beside));
    auto memory = RANK_VALUE(PeerMemory::Create(*control, rank.gpus, rank.device(), ring, 4096));
    const void* const of_first = memory->of(0);
    const auto is_there = [&] { return IsGpu(RANK_VALUE(rank.gpus.DeviceOf(of_first))); };
    if (rank.rank == 0) {
      memory.reset();
      closed.count_down();
      looked.wait();
      PeerMemory::FreeWhatIsDone(rank.device());
      RANK_CHECK(!is_there(), "it is not freed");
    } else {
      closed.wait();
      memory.reset();
      RANK_CHECK(is_there(), "another rank has freed it");
      looked.count_down();
    }
  });
}

TEST_CASE("DDP_PEER_COPIES says from which size on") {
  const auto from = [](const char* text) {
    const Variable variable("DDP_PEER_COPIES", text);
    return PeerLimits::FromEnv();
  };
  CHECK(from("never")->from == PeerLimits::kNever);
  CHECK(from("auto")->automatic);
  CHECK(from("from=3M")->from == 3 << 20);
  CHECK(!from("from=3M")->automatic);
  CHECK(from("chunk=4K")->chunk == 4096);
  for (const char* wrong :
       {"4M", "from=", "from=4G", "size=1", "from=4M,", "chunk=0", "from=4M,chunk=4095", "chunk=1025M"})
    CHECK(!from(wrong).ok());
}

}  // namespace
}  // namespace ddp::testing::simulated
