// SPDX-License-Identifier: Apache-2.0
// What becomes of groups of the nccl backend when NCCL or a rank fails, hangs, or does not do what it should.
#include <pthread.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "tests/support/gpu_results.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;
constexpr absl::StatusCode kAborted = absl::StatusCode::kAborted;

TEST_CASE("a call that fails names itself, and fails the group on all ranks", "[nccl]") {
  for (const char* function :
       {"AllReduce", "Broadcast", "AllGather", "ReduceScatter", "Send", "RedOpCreatePreMulSum"}) {
    Job job(2);
    std::barrier all_have_a_group(2);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      all_have_a_group.arrive_and_wait();
      Array a(rank, group, DType::kFloat32, 4, false), b(rank, group, DType::kFloat32, 8, false),
          c(rank, group, DType::kFloat32, 8, false);
      if (rank.rank == 1) rank.nccl.Plan(function, 1, Mishap::kFail, nccl::kRemoteError);
      const std::string name = function;
      Work work;
      if (name == "AllReduce") work = group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream);
      if (name == "Broadcast") work = group.Broadcast(a.Cut(1), 0, kNoStream);
      if (name == "AllGather") work = group.AllGather(a.Cut(1), b.Cut(1), kNoStream);
      if (name == "ReduceScatter") work = group.ReduceScatter(b.Cut(1), a.Cut(1), {}, kNoStream);
      if (name == "Send") work = group.AllToAll(b.Cut(1), c.Cut(1), kNoStream);
      if (name == "RedOpCreatePreMulSum")
        work = group.AllReduce(a.Cut(1), a.Cut(1), {.op = ReduceOp::kSum, .prescale = 3}, kNoStream);
      RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kUnavailable, "rank 1", "failed", "peer's process");
      RANK_CHECK_STATUS(group.status(), absl::StatusCode::kUnavailable, "rank 1");
      RANK_CHECK_STATUS(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream), absl::StatusCode::kUnavailable, "rank 1");
    });
    CHECK(job.nccl.live_comms() == 0);
  }
}

TEST_CASE("ranks that call different things are told so, and nobody hangs") {
  const std::function<Work(Rank&, ProcessGroup&, Array&)> calls[] = {
      [](Rank& rank, ProcessGroup& group, Array& a) {  // counts
        const Buffer b{a.whole().data, rank.rank == 0 ? 5u : 7u, DType::kFloat32, rank.device()};
        return group.AllReduce(b, b, {}, kNoStream);
      },
      [](Rank& rank, ProcessGroup& group, Array& a) {  // operations
        return rank.rank == 0 ? group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream)
                              : group.Broadcast(a.Cut(1), 0, kNoStream);
      },
      [](Rank& rank, ProcessGroup& group, Array& a) {  // ranges
        return group.AllReduce(a.Cut(rank.rank == 0 ? 1 : 2), a.Cut(rank.rank == 0 ? 1 : 2), {}, kNoStream);
      },
  };
  for (const auto& call : calls) {
    if (Staged() && &call == &calls[2]) continue;  // that may differ there
    Job job(2);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      Array a(rank, group, DType::kFloat32, 10, false);
      RANK_CHECK_STATUS(call(rank, group, a).Wait(), absl::StatusCode::kFailedPrecondition, "rank 0 calls",
                        "rank 1 calls", "same order");
    });
  }
}

TEST_CASE("ranks that give memory of different kinds are told so, and nobody hangs") {
  // What a root alone gives is empty elsewhere.
  using Operation = Work (*)(ProcessGroup & group, const Buffer& all, const Buffer& part, bool is_root);
  const Operation operations[] = {
      [](ProcessGroup& g, const Buffer& a, const Buffer&, bool) { return g.AllReduce(a, a, {}, kNoStream); },
      [](ProcessGroup& g, const Buffer& a, const Buffer&, bool) { return g.Broadcast(a, 0, kNoStream); },
      [](ProcessGroup& g, const Buffer& a, const Buffer&, bool root) {
        return g.Reduce(a, root ? Buffers(a) : Buffers(), 0, {}, kNoStream);
      },
      [](ProcessGroup& g, const Buffer& a, const Buffer& part, bool root) {
        return g.Gather(part, root ? Buffers(a) : Buffers(), 0, kNoStream);
      },
      [](ProcessGroup& g, const Buffer& a, const Buffer& part, bool root) {
        return g.Scatter(root ? Buffers(a) : Buffers(), part, 0, kNoStream);
      },
      [](ProcessGroup& g, const Buffer& a, const Buffer& part, bool) {
        return g.ReduceScatter(a, part, std::vector<size_t>{5, 5}, {}, kNoStream);
      },
  };
  for (const Operation& operation : operations) {
    Job job(2);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      Array on_gpu(rank, group, DType::kFloat32, 10, false), gpu_part(rank, group, DType::kFloat32, 5, false);
      std::vector<float> on_cpu(10), cpu_part(5);
      const auto host = [](std::vector<float>& v) { return Buffer{v.data(), v.size(), DType::kFloat32, Device{}}; };
      const auto start = [&](bool gpu) {
        return operation(group, gpu ? on_gpu.whole() : host(on_cpu), gpu ? gpu_part.whole() : host(cpu_part),
                         rank.rank == 0);
      };
      RANK_CHECK_OK(start(false).Wait());
      RANK_CHECK_OK(start(true).Wait());
      absl::Status status = start(rank.rank == 0).Wait();
      // A rank that only sends may be done at once; its next operation tells.
      const bool early = status.ok();
      if (early) status = group.Barrier().Wait();
      RANK_CHECK_STATUS(status, absl::StatusCode::kFailedPrecondition, "rank 0 calls", "rank 1 calls");
      const bool sends_only =
          &operation == &operations[3] || &operation == &operations[4] || (Staged() && &operation == &operations[1]);
      if (sends_only) return;  // Gather, Scatter, and Broadcast
      RANK_CHECK(!early);
      RANK_CHECK_STATUS(status, absl::StatusCode::kFailedPrecondition, "on GPU memory", "on CPU memory");
      // The group has failed as a whole.
      RANK_CHECK_STATUS(group.status(), absl::StatusCode::kFailedPrecondition, "on GPU memory");
      RANK_CHECK_STATUS(start(false).Wait(), absl::StatusCode::kFailedPrecondition, "on GPU memory");
    });
    CHECK(job.nccl.live_comms() == 0);
  }
}

TEST_CASE("Abort releases whoever waits, at every stage", "[nccl]") {
  for (Mishap stage : {Mishap::kHang, Mishap::kStuck}) {  // in the call; on the GPU
    for (int aborter : {0, 1}) {
      Job job(2);
      job.Run([&](Rank& rank, ProcessGroup& group) {
        Array a(rank, group, DType::kFloat32, 10, true);
        if (rank.rank == 0) rank.nccl.Plan("AllReduce", 0, stage);
        std::thread other;
        if (rank.rank == aborter) {
          other = std::thread([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            group.Abort(absl::InternalError("enough"));
          });
        }
        const absl::Status status = group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait();
        if (other.joinable()) other.join();
        RANK_CHECK_STATUS(status, kAborted, "enough", absl::StrCat("rank ", aborter));
        RANK_CHECK_STATUS(group.Allocate(10, rank.device()), kAborted, "enough");
      });
      CHECK(job.nccl.live_comms() == 0);
    }
  }
}

TEST_CASE("a GPU that does not come free after an abort is told with the remedy", "[nccl]") {
  struct Case {
    int version;
    const char* remedy;
  };
  for (const Case& c : {Case{22203, "2.28 and later do"}, Case{22809, "NCCL_WIN_ENABLE=0"}, Case{22902, nullptr}}) {
    Job job(2, c.version);
    std::atomic<int> ready{0};
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      NcclGroupOptions options = rank.Options();
      options.abort_grace = absl::Milliseconds(200);
      std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateGpuGroup(std::move(control), options));
      Array a(rank, *group, DType::kFloat32, 10, true);
      for (++ready; ready < 2;) std::this_thread::yield();  // both have their memory
      if (rank.rank == 1) {
        while (group->status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      rank.nccl.Plan("CommAbort", 0, Mishap::kSlow);
      Work work = group->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream);  // nobody comes
      group->Abort(absl::InternalError("enough"));
      const absl::Status status = work.Wait();
      RANK_CHECK_STATUS(status, kAborted, "enough", "end this process");
      const bool told = absl::StrContains(status.message(), c.remedy == nullptr ? "and later" : c.remedy);
      RANK_CHECK_EQ(told, c.remedy != nullptr);
    });
    // The abort goes on behind the group's back, and uses this NCCL until it ends.
    while (job.nccl.live_comms() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
}

TEST_CASE("an error that NCCL notices by itself ends what is pending", "[nccl]") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kFloat32, 10, true);
    if (rank.rank == 0) {
      rank.nccl.Plan("AllReduce", 0, Mishap::kStuck);
      rank.nccl.SetAsyncError(0, nccl::kRemoteError);
    }
    RANK_CHECK_STATUS(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait(), absl::StatusCode::kUnavailable,
                      "rank 0", "an operation failed");
  });
}

// FinishBackward returns before the reduction has run: what is enqueued behind it must be able to know that it failed.
TEST_CASE("a step behind a reduction that fails after the call returned is skipped", "[nccl]") {
  Job job(2);
  std::atomic<int> enqueued{0};
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    Array gradient(rank, group, DType::kFloat32, 4, true), weight(rank, group, DType::kFloat32, 4, false),
        skip(rank, group, DType::kInt32, 1, false);
    const auto step = [&] {
      Work work = group.AllReduce(gradient.Cut(1), gradient.Cut(1), {}, mine);
      RANK_CHECK_OK(work.BlockStream(mine));
      Commit(rank, group, skip, stream);
      FakeDevices::Enqueue(stream.get(), [&] {
        for (size_t i = 0; i < 4 && skip.Get(0) == 0; ++i) weight.Set(i, weight.Get(i) - gradient.Get(i));
      });
    };
    for (size_t i = 0; i < 4; ++i) gradient.Set(i, 1);
    step();
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(weight.Get(3), -2);
    for (size_t i = 0; i < 4; ++i) gradient.Set(i, 1e9);
    rank.nccl.Plan("AllReduce", rank.rank, Mishap::kStuck);
    step();  // has returned: nothing is known yet
    RANK_CHECK_OK(group.status());
    for (++enqueued; enqueued < rank.size;) std::this_thread::yield();
    group.Abort(absl::InternalError("lost"));
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(weight.Get(3), -2);
    RANK_CHECK_EQ(skip.Get(0), 1);
  });
}

// NCCL's kernel that is aborted hands on what it has not received, and a peer's ends as though that were the sum.
TEST_CASE("what comes from a rank that is aborted is no result", "[nccl]") {
  Job job(3);
  job.gpus.late = [](int, int) { return false; };
  std::atomic<int> enqueued{0};
  std::atomic<bool> slow{false};
  // Rank 1 hears of the failure late.
  job.gpus.fail = [&](absl::string_view call, int device) {
    char thread[16] = {};
    pthread_getname_np(pthread_self(), thread, sizeof thread);
    const bool looks = call == "Finished" && device == 1 && enqueued == 2;
    if (looks && absl::string_view(thread) == "ddp-progress" && !slow.exchange(true)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return absl::OkStatus();
  };
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    Array a(rank, group, DType::kFloat32, 4, false), skip(rank, group, DType::kInt32, 1, false);
    if (rank.rank == 2) {  // does not come
      while (group.status().ok()) std::this_thread::yield();
      return;
    }
    Work work = group.AllReduce(a.whole(), a.whole(), {}, mine);
    RANK_CHECK_OK(work.BlockStream(mine));
    Commit(rank, group, skip, stream);
    for (++enqueued; enqueued < 2 || !slow;) std::this_thread::yield();
    if (rank.rank == 0) group.Abort(absl::InternalError("lost"));
    RANK_CHECK_STATUS(work.Wait(), kAborted, "lost", "rank 0");
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(skip.Get(0), 1);
  });
  job.gpus.fail = [](absl::string_view, int) { return absl::OkStatus(); };
}

TEST_CASE("a group that is destroyed with operations pending ends them", "[nccl]") {
  Job job(2);
  Work works[2];
  std::vector<std::shared_ptr<void>> memory(2);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    std::shared_ptr<void>& mine = memory[static_cast<size_t>(rank.rank)];
    mine = RANK_VALUE(rank.gpus.Allocate(rank.device(), 40));
    const Buffer b{mine.get(), 10, DType::kFloat32, rank.device()};
    rank.nccl.Plan("AllReduce", rank.rank, Mishap::kStuck);
    works[rank.rank] = group.AllReduce(b, b, {}, kNoStream);
  });
  for (Work& work : works) RANK_CHECK_STATUS(work.Wait(), kAborted, "destroyed");
}

TEST_CASE("a rank that leaves early, and an error of NCCL that this explains, name it", "[nccl]") {
  for (const bool noticed : {false, true}) {
    Job job(3);
    std::atomic<int> summed{0};  // ranks that have seen the end of the first sum
    std::atomic<bool> left{false};
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      std::unique_ptr<ProcessGroup> group =
          RANK_VALUE(CreateGpuGroup(std::move(control), rank.Options(), /*staged=*/false));
      const auto sum = [&] {
        Array a(rank, *group, DType::kFloat32, 10, false);
        return group->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait();
      };
      RANK_CHECK_OK(sum());
      for (++summed; summed < 3 && group->status().ok();) std::this_thread::yield();
      if (rank.rank == 1) {
        group.reset();
        left = true;
        return;
      }
      if (rank.rank == 0 && noticed) {
        while (!left) std::this_thread::yield();
        rank.nccl.SetAsyncError(0, nccl::kRemoteError);
      }
      const absl::Status status = sum();
      RANK_CHECK_STATUS(status, absl::StatusCode::kUnavailable, "rank 1 has left", "Join");
      RANK_CHECK(FailedRanks(status) == std::vector<int>{1});
    });
  }
}

// The boards of the two hosts know nothing of each other.
TEST_CASE("an abort on another host ends what waits for GPUs", "[nccl]") {
  for (const bool captured : {false, true}) {
    Job job(2);
    job.hosts = 2;
    std::atomic<bool> waits{false};  // rank 0
    job.Run([&](Rank& rank, ProcessGroup& group) {
      const OwnedStream stream = rank.MakeStream();
      const Stream mine{rank.device(), stream.get()};
      Array a(rank, group, DType::kFloat32, 10, false);
      if (captured) RANK_CHECK_OK(FakeDevices::BeginCapture(stream.get()));
      Work work;
      if (rank.rank == 0 || captured) work = group.AllReduce(a.Cut(1), a.Cut(1), {}, mine);
      if (captured) {
        RANK_CHECK_OK(work.BlockStream(mine));
        const auto graph = RANK_VALUE(FakeDevices::EndCapture(stream.get()));
        if (rank.rank == 0) FakeDevices::Launch(graph, stream.get());
        if (rank.rank == 0) FakeDevices::RunEarly(stream.get());
      }
      if (rank.rank == 0) waits = true;
      while (rank.rank == 1 && !waits && group.status().ok()) std::this_thread::yield();
      if (rank.rank == 1) group.Abort(absl::InternalError("enough"));
      if (rank.rank == 0 && !captured) RANK_CHECK_STATUS(work.Wait(), kAborted, "enough");
      if (rank.rank == 0) FakeDevices::Synchronize(stream.get());
      RANK_CHECK_STATUS(group.status(), kAborted, "enough");
    });
  }
}

// Captures an all-reduce of `a`.
std::shared_ptr<FakeGraph> CaptureSum(ProcessGroup& group, const Array& a, Stream stream) {
  RANK_CHECK_OK(FakeDevices::BeginCapture(stream.native));
  RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(1), {}, stream).BlockStream(stream));
  return RANK_VALUE(FakeDevices::EndCapture(stream.native));
}

TEST_CASE("an error that NCCL notices by itself ends a graph that runs", "[nccl]") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    Array a(rank, group, DType::kFloat32, 10, true);
    if (rank.rank == 0) rank.nccl.Plan("AllReduce", 0, Mishap::kStuck);
    const auto graph = CaptureSum(group, a, {rank.device(), stream.get()});
    FakeDevices::Launch(graph, stream.get());
    if (rank.rank == 0) rank.nccl.SetAsyncError(0, nccl::kRemoteError);
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_STATUS(group.status(), absl::StatusCode::kUnavailable, "rank 0", "an operation failed");
  });
}

TEST_CASE("a rank that does not launch its graph is named when time is out") {
  Job job(3);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    Array a(rank, group, DType::kInt32, 10, true);
    a.Set(9, 1);
    RANK_CHECK_OK(group.SetTimeout(TimeFor(absl::Seconds(2))));
    const auto graph = CaptureSum(group, a, {rank.device(), stream.get()});
    RANK_CHECK_OK(group.SetTimeout(absl::Seconds(60)));  // of what comes after it
    for (int launch = 0; launch < 2; ++launch) FakeDevices::Launch(graph, stream.get());
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(a.Get(9), 9);
    if (rank.rank != 1) {
      FakeDevices::Launch(graph, stream.get());
      FakeDevices::Synchronize(stream.get());
    } else {
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    RANK_CHECK_STATUS(group.status(), absl::StatusCode::kDeadlineExceeded, "rank 1 has not launched its graph",
                      "DDP_TIMEOUT");
    RANK_CHECK(FailedRanks(group.status()) == std::vector<int>{1});
  });
}

TEST_CASE("a graph that is launched when its group has gone skips its step") {
  for (const bool keeps_work : {false, true}) {
    Job job(1);
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateLocalDeviceGroup(std::move(control), rank.Options()));
      const OwnedStream stream = rank.MakeStream();
      Array a(rank, *group, DType::kInt32, 10, true), skip(rank, *group, DType::kInt32, 1, false);
      Work work;
      const auto graph = CaptureSum(rank, *group, a.Cut(1), skip, stream, &work);
      if (!keeps_work) work = Work();
      FakeDevices::Launch(graph, stream.get());
      FakeDevices::Synchronize(stream.get());
      RANK_CHECK_EQ(skip.Get(0), 0);
      group.reset();
      FakeDevices::Launch(graph, stream.get());
      FakeDevices::Synchronize(stream.get());
      RANK_CHECK_EQ(skip.Get(0), 1);
    });
  }
}

TEST_CASE("who destroys a group waits for a graph that runs", "[nccl]") {
  Job job(2);
  std::atomic<bool> came{false};
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateGpuGroup(std::move(control), rank.Options()));
    const OwnedStream stream = rank.MakeStream();
    Array a(rank, *group, DType::kInt32, 10, true);
    a.Set(9, 1);
    const auto graph = CaptureSum(*group, a, {rank.device(), stream.get()});
    FakeDevices::Launch(graph, stream.get());
    if (rank.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      came = true;
    } else {
      FakeDevices::RunEarly(stream.get());
      // Behind the failed word sequences are counted that have begun.
      const std::atomic_ref<uint32_t> begun(const_cast<uint32_t*>(group->failed_word())[1]);
      while (begun == 0) std::this_thread::yield();
      group.reset();
      RANK_CHECK(came);
    }
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(a.Get(9), 2);
  });
}

TEST_CASE("a world of one needs no NCCL", "[nccl]") {
  Job job(1);
  job.RunOver([](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateLocalDeviceGroup(std::move(control), rank.Options()));
    RANK_CHECK(group->backend() == "local");
    Array a(rank, *group, DType::kFloat32, 10, true), b(rank, *group, DType::kFloat16, 10, true);
    a.Set(9, 3);
    RANK_CHECK_OK(
        group->AllReduce(a.Cut(2), b.Cut(3), {.op = ReduceOp::kAvg, .prescale = 2, .postscale = 2}, kNoStream).Wait());
    RANK_CHECK_EQ(b.Get(9), 12);
    RANK_CHECK_OK(group->AllGather(b.Cut(1), b.Cut(1), kNoStream).Wait());
    RANK_CHECK_OK(group->Broadcast(b.Cut(1), 0, kNoStream).Wait());
    RANK_CHECK_OK(group->AllToAll(b.Cut(1), b.Cut(1), kNoStream).Wait());
    RANK_CHECK_OK(group->Barrier().Wait());
    RANK_CHECK(RANK_VALUE(group->Split(0, 0))->size() == 1);
    RANK_CHECK_EQ(rank.nccl.Calls("AllReduce"), 0);
    group->Abort(absl::InternalError("enough"));
    RANK_CHECK_STATUS(group->Barrier(), kAborted, "enough");
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
