// SPDX-License-Identifier: Apache-2.0
// Time-outs of the nccl backend over an NCCL and GPUs that are none.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "ddp/comm_hook.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

TEST_CASE("a rank that does not come is named when time is out") {
  Job job(3);
  job.timeout = TimeFor(absl::Seconds(4));
  job.Run([](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kFloat32, 10, false);
    if (rank.rank == 1) {
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      RANK_CHECK_STATUS(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait(), absl::StatusCode::kDeadlineExceeded,
                        "rank 1");
      return;
    }
    RANK_CHECK_STATUS(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait(), absl::StatusCode::kDeadlineExceeded,
                      "did not arrive: rank 1", "all_reduce", absl::FormatDuration(rank.timeout), "DDP_TIMEOUT");
  });
}

TEST_CASE("an operation on CPU memory that times out stays the cause after an abort, also for work on the GPU") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    RANK_CHECK_OK(group.SetTimeout(TimeFor(absl::Seconds(1))));
    Array a(rank, group, DType::kFloat32, 10, false);
    if (rank.rank == 0) {
      int value = 0;
      const absl::Status late =
          group.AllReduce(Buffer{&value, 1, DType::kInt32, {}}, Buffer{&value, 1, DType::kInt32, {}}, {}).Wait();
      RANK_CHECK_STATUS(late, absl::StatusCode::kDeadlineExceeded, "did not arrive: rank 1");
      group.Abort(late);
    } else {
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    RANK_CHECK_STATUS(group.status(), absl::StatusCode::kDeadlineExceeded, "did not arrive: rank 1");
    RANK_CHECK_STATUS(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait(), absl::StatusCode::kDeadlineExceeded,
                      "did not arrive: rank 1");
  });
}

TEST_CASE("work of the program's own that does not end is told when time is out") {
  Job job(1);
  const ScopedDevices devices(job.gpus);
  job.timeout = TimeFor(absl::Seconds(1));
  job.Run([](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    std::atomic<bool> ended{false};
    FakeDevices::Enqueue(stream.get(), [&] {
      while (!ended) std::this_thread::yield();
    });
    Work work = StreamWork(group, {rank.device(), stream.get()});
    RANK_CHECK_STATUS(work.Wait(absl::Now()), absl::StatusCode::kDeadlineExceeded, "it goes on");
    RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kDeadlineExceeded, "rank 0", "StreamWork", "stuck or slow",
                      absl::FormatDuration(rank.timeout), "DDP_TIMEOUT");
    RANK_CHECK(!work.Done());
    ended = true;
    RANK_CHECK_OK(work.Wait());
  });
}

TEST_CASE("a time-out that is set counts for what begins after it") {
  const absl::Duration timeout = TimeFor(absl::Seconds(1));
  std::atomic<bool> come{false}, summed{false};
  Job job(2);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kFloat32, 10, true);
    const auto sum = [&] { return group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream); };
    if (rank.rank == 0) {
      Work pending = sum();
      RANK_CHECK_OK(group.SetTimeout(timeout));
      RANK_CHECK_STATUS(pending.Wait(absl::Now() + 2 * timeout), absl::StatusCode::kDeadlineExceeded, "it goes on");
      RANK_CHECK_OK(group.status());
      come = true;
      RANK_CHECK_OK(pending.Wait());
      while (!summed) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the next failure would end that
      RANK_CHECK_STATUS(sum().Wait(), absl::StatusCode::kDeadlineExceeded, "did not arrive: rank 1", "all_reduce",
                        absl::FormatDuration(timeout));
    } else {
      while (!come) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      RANK_CHECK_OK(sum().Wait());
      summed = true;
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
}

TEST_CASE("a part of a group has the time-out that the group has when it is made") {
  Job job(2);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const absl::Duration timeout = TimeFor(absl::Seconds(2));
    RANK_CHECK_OK(group.SetTimeout(timeout));
    for (const int color : {0, rank.rank}) {
      const std::unique_ptr<ProcessGroup> part = RANK_VALUE(group.Split(color, rank.rank));
      RANK_CHECK(part->timeout() == timeout);
    }
    RANK_CHECK_STATUS(group.SetTimeout(absl::ZeroDuration()), absl::StatusCode::kInvalidArgument, "set_timeout");
  });
}

TEST_CASE("an error of a part of the world names the ranks of the world, too") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    RANK_CHECK_OK(group.SetTimeout(TimeFor(absl::Seconds(2))));
    const std::unique_ptr<ProcessGroup> part = RANK_VALUE(group.Split(0, -rank.rank));
    Array a(rank, *part, DType::kFloat32, 10, false);
    const auto sum = [&] { return part->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait(); };
    RANK_CHECK_STATUS(part->Broadcast(a.Cut(1), 2, kNoStream).Wait(), absl::StatusCode::kInvalidArgument,
                      absl::StrCat("rank ", part->rank(), " (rank ", rank.rank, " of the world): broadcast: "));
    if (part->rank() == 1) {
      while (part->status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const absl::Status status = sum();
    RANK_CHECK_STATUS(status, absl::StatusCode::kDeadlineExceeded, "did not arrive: rank 1",
                      "; ranks 0, 1 of this group are ranks 1, 0 of the world");
    RANK_CHECK(FailedRanks(status) == std::vector<int>{1});
  });
}

TEST_CASE("a missing root of a broadcast is named alone when time is out") {
  Job job(3);
  job.timeout = TimeFor(absl::Seconds(2));
  job.Run([](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kFloat32, 10, false);
    if (rank.rank != 1) {
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const absl::Status status = group.Broadcast(a.Cut(1), 0, kNoStream).Wait();
    RANK_CHECK_STATUS(status, absl::StatusCode::kDeadlineExceeded, "did not arrive: rank 0;", "broadcast");
    RANK_CHECK(FailedRanks(status) == std::vector<int>{0});
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
