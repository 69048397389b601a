// SPDX-License-Identifier: Apache-2.0
// Groups of the nccl backend over several hosts: who is named where NCCL fails because a rank of another host is gone.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/failed_ranks.h"
#include "tests/support/forwarding_group.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;
using absl::StatusCode;
using std::chrono::milliseconds;

// Hosts have nothing in common but NCCL and the wire: the boards know nothing of each other, nor do the nodes of the
// group over CPU memory.
struct HostsJob : Job {
  HostsJob(int ranks, int on_host) : Job(ranks) {
    hosts = ranks / on_host;
    setenv("DDP_NODE_SIZE", std::to_string(on_host).c_str(), 1);
  }
  ~HostsJob() { unsetenv("DDP_NODE_SIZE"); }
};

// While it lives a rank's progress thread hangs: nothing of its process answers.
class Frozen final : public ProgressThread::Client {
 public:
  explicit Frozen(ProgressThread* progress) : progress_(*progress) {
    progress_.Add(this);
    while (!here_) std::this_thread::yield();
  }
  ~Frozen() override {
    over_ = true;
    progress_.Remove(this);
  }
  ProgressThread::Found Tick() override {
    for (here_ = true; !over_;) std::this_thread::sleep_for(milliseconds(1));
    return ProgressThread::Found::kNothing;
  }

 private:
  ProgressThread& progress_;
  std::atomic<bool> here_{false}, over_{false};
};

enum class Way { kNoticed, kCall, kGraph, kTimeOut };

// One sum in which NCCL fails on this rank, in this way. Returns what the group has failed with.
absl::Status FailedSum(Rank& rank, ProcessGroup& group, Way way) {
  const OwnedStream stream = rank.MakeStream();
  const Stream mine{rank.device(), stream.get()};
  Array a(rank, group, DType::kFloat32, 10, false);
  if (way == Way::kTimeOut) RANK_CHECK_OK(group.SetTimeout(TimeFor(absl::Milliseconds(500))));
  rank.nccl.Plan("AllReduce", rank.rank, way == Way::kCall ? Mishap::kFail : Mishap::kStuck, nccl::kRemoteError);
  if (way == Way::kGraph) {
    RANK_CHECK_OK(FakeDevices::BeginCapture(stream.get()));
    RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(1), {}, mine).BlockStream(mine));
    FakeDevices::Launch(RANK_VALUE(FakeDevices::EndCapture(stream.get())), stream.get());
    FakeDevices::RunEarly(stream.get());
    rank.nccl.SetAsyncError(rank.rank, nccl::kRemoteError);
    FakeDevices::Synchronize(stream.get());
    return group.status();
  }
  if (way == Way::kNoticed) rank.nccl.SetAsyncError(rank.rank, nccl::kRemoteError);
  return group.AllReduce(a.Cut(1), a.Cut(1), {}, mine).Wait();
}

TEST_CASE("a rank of another host that does not answer is named where NCCL fails, in bounded time", "[nccl]") {
  for (const Way way : {Way::kNoticed, Way::kCall, Way::kGraph, Way::kTimeOut}) {
    HostsJob job(2, 1);
    std::atomic<bool> frozen{false}, failed{false};
    job.Run([&](Rank& rank, ProcessGroup& group) {
      if (rank.rank == 1) {
        const Frozen freeze(&rank.progress);
        for (frozen = true; !failed;) std::this_thread::sleep_for(milliseconds(1));
        return;
      }
      while (!frozen) std::this_thread::yield();
      const auto began = std::chrono::steady_clock::now();
      const absl::Status status = FailedSum(rank, group, way);
      const auto took = std::chrono::steady_clock::now() - began;
      failed = true;
      RANK_CHECK_STATUS(status, way == Way::kTimeOut ? StatusCode::kDeadlineExceeded : StatusCode::kUnavailable,
                        "rank 1 on node 1", "no answer", way == Way::kTimeOut ? "timed out" : "failed: some error");
      RANK_CHECK(FailedRanks(status) == std::vector<int>{1}, status.ToString());
      RANK_CHECK(took < absl::ToChronoMilliseconds(TimeFor(absl::Seconds(10))));
    });
    CHECK(job.nccl.live_comms() == 0);
  }
}

// Nobody could tell the others of a failure, to whom NCCL hands on what is no result when it is aborted.
TEST_CASE("NCCL on several hosts needs a thread that can use MPI", "[nccl]") {
  HostsJob job(2, 1);
  job.RunOver([](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    if (rank.rank == 1) control = std::make_unique<Foreground>(std::move(control));
    RANK_CHECK_STATUS(CreateGpuGroup(std::move(control), rank.Options()).status(), StatusCode::kFailedPrecondition,
                      "rank 1", "not in the background");
  });
  CHECK(job.nccl.Calls("CommInitRankConfig") == 0);
}

// Another host has a board of its own.
TEST_CASE("where NCCL's start fails on one host the others do not take that for wrong data", "[nccl]") {
  HostsJob job(2, 1);
  job.nccl.Plan("AllReduce", 0, Mishap::kStuck);
  job.gpus.fail = [](absl::string_view call, int device) {
    return call == "Finished" && device == 0 ? absl::InternalError("cudaEventQuery: injected") : absl::OkStatus();
  };
  job.RunOver([](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    const absl::Status status = CreateGpuGroup(std::move(control), rank.Options()).status();
    RANK_CHECK_STATUS(status, rank.rank == 0 ? StatusCode::kInternal : StatusCode::kAborted, "rank 0",
                      "cudaEventQuery: injected");
  });
  CHECK(job.nccl.live_comms() == 0);
}

TEST_CASE("where all ranks of other hosts answer, NCCL's error blames none of them", "[nccl]") {
  for (const Way way : {Way::kNoticed, Way::kCall, Way::kGraph, Way::kTimeOut}) {
    HostsJob job(4, 2);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      if (rank.rank != 0) {
        while (group.status().ok()) std::this_thread::sleep_for(milliseconds(1));
      } else {
        FailedSum(rank, group, way).IgnoreError();
      }
      // Without its part the sum does not end on this host either, which the time-out names.
      const bool late = way == Way::kTimeOut;
      RANK_CHECK_STATUS(group.status(), late ? StatusCode::kDeadlineExceeded : StatusCode::kUnavailable, "rank 0");
      RANK_CHECK(FailedRanks(group.status()) == (late ? std::vector<int>{1} : std::vector<int>()),
                 group.status().ToString());
    });
  }
}

TEST_CASE("what a host has found out about its ranks explains NCCL's error on another", "[nccl]") {
  for (const Way way : {Way::kNoticed, Way::kCall}) {
    HostsJob job(4, 2);
    std::atomic<bool> began{false};
    job.Run([&](Rank& rank, ProcessGroup& group) {
      if (rank.rank == 2) {  // sees that rank 3 is gone, a little later than its connections break
        while (!began) std::this_thread::yield();
        std::this_thread::sleep_for(milliseconds(50));
        dynamic_cast<InternalGroup&>(group).Fail(
            WithFailedRanks(absl::UnavailableError("rank 3 (process 7) has died"), {3}));
      }
      if (rank.rank == 0) {
        began = true;
        FailedSum(rank, group, way).IgnoreError();
        RANK_CHECK_STATUS(group.status(), StatusCode::kUnavailable, "rank 3 (process 7) has died");
      }
      while (group.status().ok()) std::this_thread::sleep_for(milliseconds(1));
      RANK_CHECK_STATUS(group.status(), StatusCode::kUnavailable, "rank 3 (process 7) has died");
      RANK_CHECK(FailedRanks(group.status()) == std::vector<int>{3}, group.status().ToString());
    });
  }
}

TEST_CASE("a rank of another host that has left is named where NCCL fails", "[nccl]") {
  for (const Way way : {Way::kNoticed, Way::kCall}) {
    HostsJob job(3, 1);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      if (rank.rank == 1) return;
      if (rank.rank == 0) FailedSum(rank, group, way).IgnoreError();
      while (group.status().ok()) std::this_thread::sleep_for(milliseconds(1));
      RANK_CHECK_STATUS(group.status(), StatusCode::kUnavailable, "rank 1 has left", "some error");
      RANK_CHECK(FailedRanks(group.status()) == std::vector<int>{1}, group.status().ToString());
    });
  }
}

}  // namespace
}  // namespace ddp::testing::simulated
