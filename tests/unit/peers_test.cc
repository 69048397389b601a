// SPDX-License-Identifier: Apache-2.0
// Large all-reduces by the copy engines of GPUs that reach each other: when a group does so, what becomes of the memory
// that ranks share, and failures. Results are those of nccl_group_test and others, with DDP_TEST_PEER_COPIES=1.
#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <vector>

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
  const FakeDevices::Held before = FakeDevices::held();
  for (int round = 0; round < 2; ++round) {
    Job job(3);
    RunWithCopies(job, [](Rank& rank, ProcessGroup& group) {
      const std::unique_ptr<ProcessGroup> part = RANK_VALUE(group.Split(rank.rank == 2 ? 1 : 0, rank.rank));
      if (rank.rank != 2) CallsOfNccl(rank, *part, 3000);
      CallsOfNccl(rank, group, 3000);
    });
  }
  for (int wait = 0; wait < 1000 && !(FakeDevices::held() == before); ++wait) absl::SleepFor(absl::Milliseconds(10));
  CHECK(FakeDevices::held() == before);
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
  for (const char* wrong : {"4M", "from=", "from=4G", "size=1", "from=4M,"}) CHECK(!from(wrong).ok());
}

}  // namespace
}  // namespace ddp::testing::simulated
