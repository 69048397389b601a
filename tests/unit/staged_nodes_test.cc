// SPDX-License-Identifier: Apache-2.0
// The hierarchical backend on GPUs of several nodes, beyond what the contract of every backend says: its bits, arrays
// of many chunks, uneven nodes, what cannot be captured, and how a failure on one node ends what waits on another.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/failed_ranks.h"
#include "tests/support/forwarding_group.h"
#include "tests/support/gpu_results.h"
#include "tests/support/nccl_job.h"
#include "tests/support/variable.h"

namespace ddp::testing::simulated {
namespace {

struct NodesJob : StagedJob {
  NodesJob(int ranks, int node_size_) : StagedJob(ranks), node_size("DDP_NODE_SIZE", std::to_string(node_size_)) {}
  const Variable node_size;
};

// --- results --------------------------------------------------------------------------------------------------------

TEST_CASE("sums over the GPUs of several nodes have the CPU's bits") {
  for (const auto& [ranks, node_size] : {std::pair(2, 1), std::pair(3, 2), std::pair(4, 2)}) {
    NodesJob job(ranks, node_size);
    job.Run(CheckBitsOfAll);
  }
}

TEST_CASE("what does not fit into one chunk goes between nodes in several") {
  constexpr size_t kPart = 1'200'000;  // elements; chunks of half a million and of a million
  NodesJob job(2, 1);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const int me = rank.rank;
    Array sum = Filled(rank, group, DType::kInt32, 4 * kPart), all(rank, group, DType::kInt32, 2 * kPart, false);
    const auto sum_of = [](size_t i) { return SumOver(2, i); };
    RANK_CHECK_OK(group.AllReduce(sum.whole(), sum.whole(), {}, kNoStream).Wait());
    Expect(sum, 4 * kPart, "all_reduce", sum_of);
    const Array one = Filled(rank, group, DType::kInt32, kPart);
    RANK_CHECK_OK(group.AllGather(one.whole(), all.whole(), kNoStream).Wait());
    Expect(all, 2 * kPart, "all_gather", [](size_t i) { return kNumber(static_cast<int>(i / kPart), i % kPart); });
    const Array whole = Filled(rank, group, DType::kInt32, 2 * kPart);
    RANK_CHECK_OK(group.AllToAll(whole.whole(), all.whole(), kNoStream).Wait());
    Expect(all, 2 * kPart, "all_to_all",
           [&](size_t i) { return kNumber(static_cast<int>(i / kPart), static_cast<size_t>(me) * kPart + i % kPart); });
    Array part(rank, group, DType::kInt32, kPart, false);
    RANK_CHECK_OK(group.ReduceScatter(whole.whole(), part.whole(), {}, kNoStream).Wait());
    Expect(part, kPart, "reduce_scatter", [&](size_t i) { return SumOver(2, static_cast<size_t>(me) * kPart + i); });
    RANK_CHECK_OK(group.SendRecv(whole.whole(), 1 - me, all.whole(), 1 - me, 5, kNoStream).Wait());
    Expect(all, 2 * kPart, "send_recv", [&](size_t i) { return kNumber(1 - me, i); });
    RANK_CHECK_OK(group.Broadcast(whole.whole(), 1, kNoStream).Wait());
    Expect(whole, 2 * kPart, "broadcast", [](size_t i) { return kNumber(1, i); });
  });
}

TEST_CASE("nodes may have any numbers of ranks, and a part of the group fewer nodes") {
  for (const std::vector<int>& nodes : {std::vector{1, 2}, std::vector{3, 1}, std::vector{1, 1, 2}}) {
    int size = 0;
    std::vector<std::string> host_of;
    for (size_t n = 0; n < nodes.size(); ++n) {
      host_of.insert(host_of.end(), static_cast<size_t>(nodes[n]), "host " + std::to_string(n));
      size += nodes[n];
    }
    Job job(size);
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      rank.host = host_of[static_cast<size_t>(rank.rank)];
      const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateStagedGroup(std::move(control), rank.Options()));
      constexpr size_t kCount = 10'007;
      for (const DType type : {DType::kInt64, DType::kBFloat16, DType::kFloat32}) {
        const Array a = Filled(rank, *group, type, kCount);
        RANK_CHECK_OK(group->AllReduce(a.Cut(4), a.Cut(4), {}, kNoStream).Wait());
        if (type != DType::kBFloat16) Expect(a, kCount, "all_reduce", [&](size_t i) { return SumOver(size, i); });
      }
      // The last two ranks: on one node, or on two.
      const int color = rank.rank >= size - 2 ? 1 : 0;
      const std::unique_ptr<ProcessGroup> part = RANK_VALUE(group->Split(color, rank.rank));
      const Array b = Filled(rank, *part, DType::kFloat32, kCount);
      RANK_CHECK_OK(part->AllReduce(b.whole(), b.whole(), {.op = ReduceOp::kMax}, kNoStream).Wait());
    });
  }
}

TEST_CASE("an infinity on one node is found on all") {
  NodesJob job(3, 2);
  job.Run(CheckInfinityIsFound);
}

// --- CUDA graphs ----------------------------------------------------------------------------------------------------

TEST_CASE("what cannot be captured is refused before anybody hears of it") {
  NodesJob job(2, 1);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    const Array a = Filled(rank, group, DType::kFloat32, 100);
    if (rank.rank == 0) {  // alone: the others need not know
      const DeviceGuard guard(rank.gpus, rank.device());
      RANK_CHECK_OK(FakeDevices::BeginCapture(stream.get()));
      for (Work work : {group.AllReduce(a.whole(), a.whole(), {}, mine), group.Broadcast(a.whole(), 1, mine),
                        group.Send(a.whole(), 1, 0, mine)}) {
        RANK_CHECK(work.Done());
        RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kInvalidArgument, "CUDA graph", "several nodes");
      }
      RANK_CHECK_OK(FakeDevices::EndCapture(stream.get()).status());
    }
    RANK_CHECK_OK(group.AllReduce(a.whole(), a.whole(), {}, mine).Wait());
    Expect(a, 100, "all_reduce", [](size_t i) { return SumOver(2, i); });
  });
}

// --- failures -------------------------------------------------------------------------------------------------------

TEST_CASE("a rank that is gone is named on every node, and the GPUs come free") {
  for (const int victim : {1, 2}) {  // beside another rank, and alone on its node
    NodesJob job(3, 2);
    CheckGoneRankIsNamed(job, victim);
  }
}

TEST_CASE("Abort on one node releases whoever waits on another") {
  NodesJob job(3, 2);
  std::atomic<int> waiting{0};
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    const Array a = Filled(rank, group, DType::kFloat32, 1 << 18);
    RANK_CHECK_OK(group.Barrier().Wait());
    if (rank.rank == 0) {
      while (waiting < 2) std::this_thread::yield();
      group.Abort(absl::InternalError("enough"));
    }
    Work work = rank.rank == 0 ? Work() : group.AllReduce(a.whole(), a.whole(), {}, mine);
    ++waiting;
    if (rank.rank > 0) RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kAborted, "enough", "rank 0");
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_STATUS(group.AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait(), absl::StatusCode::kAborted,
                      "enough");
  });
}

// Its stream goes on as soon as it can know of the failure, behind a result of the other nodes that has not come.
TEST_CASE("a rank that has no result of other nodes passes none on within its own") {
  NodesJob job(3, 2);
  job.gpus.fail = [](absl::string_view call, int) {
    if (call == "LeaveCapturesAlone") std::this_thread::sleep_for(std::chrono::milliseconds(100));  // of an abort
    return absl::OkStatus();
  };
  job.gpus.late = [](int, int) { return false; };
  std::atomic<int> called{0};
  job.Run([&](Rank& rank, ProcessGroup& group) {
    constexpr size_t kCount = 10'000;
    const Array in = Filled(rank, group, DType::kFloat32, kCount), out = Filled(rank, group, DType::kFloat32, kCount);
    RANK_CHECK_OK(group.Barrier().Wait());
    Work work = rank.rank == 2 ? Work() : group.AllReduce(in.whole(), out.whole(), {}, kNoStream);
    ++called;
    while (called < 3) std::this_thread::yield();
    if (rank.rank == 2) return group.Abort(absl::DataLossError("the disk is full"));
    RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kAborted, "the disk is full", "rank 2");
    Expect(out, kCount, "what was there before", [&](size_t i) { return kNumber(rank.rank, i); });
  });
}

TEST_CASE("a rank of another node that does not come is named after the time-out") {
  NodesJob job(3, 2);
  std::atomic<int> over{0}, ready{0};
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    const Array a = Filled(rank, group, DType::kFloat32, 1 << 18);
    RANK_CHECK_OK(group.AllReduce(a.whole(), a.whole(), {}, mine).Wait());
    RANK_CHECK_OK(group.SetTimeout(TimeFor(absl::Seconds(1))));
    for (++ready; ready < 3;) std::this_thread::yield();
    if (rank.rank == 2) {
      while (over < 2) std::this_thread::yield();
      return;
    }
    const absl::Status status = group.AllReduce(a.whole(), a.whole(), {}, mine).Wait();
    FakeDevices::Synchronize(stream.get());
    ++over;
    RANK_CHECK_STATUS(status, absl::StatusCode::kDeadlineExceeded, "timed out", "rank 2");
    RANK_CHECK(FailedRanks(status) == std::vector<int>{2});
  });
}

TEST_CASE("a group on several nodes that is destroyed in the middle of an operation ends it") {
  NodesJob job(2, 1);
  CheckEndsWithItsGroup(job);
}

TEST_CASE("what one rank lacks for a group of several nodes, all ranks are told") {
  NodesJob no_memory(3, 2);
  no_memory.gpus.fail = [](absl::string_view call, int device) {
    return call == "AllocatePinned" && device == 2 ? absl::ResourceExhaustedError("cudaHostAlloc: full")
                                                   : absl::OkStatus();
  };
  no_memory.Expect(absl::StatusCode::kResourceExhausted, {"rank 2", "cudaHostAlloc: full"});
  NodesJob no_ring(3, 2);
  no_ring.gpus.fail = [](absl::string_view call, int) {  // one of the ranks that share memory asks for all
    return call == "RegisterHost" ? absl::ResourceExhaustedError("cudaHostRegister: no") : absl::OkStatus();
  };
  no_ring.Expect(absl::StatusCode::kResourceExhausted, {"cudaHostRegister: no", "memlock"});
}

TEST_CASE("a group of several nodes needs a thread that can use MPI") {
  NodesJob job(2, 1);
  job.RunOver([](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    const absl::Status status =
        CreateStagedGroup(std::make_unique<Foreground>(std::move(control)), rank.Options()).status();
    RANK_CHECK_STATUS(status, absl::StatusCode::kFailedPrecondition, "rank 0", "not in the background");
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
