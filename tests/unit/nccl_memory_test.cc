// SPDX-License-Identifier: Apache-2.0
// The nccl backend's memory over an NCCL and GPUs that are none: registered with NCCL, given back, shared by groups.
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/internal_group.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;

TEST_CASE("sums on registered memory use its kernels where they are faster, as measured") {
  struct Case {
    int version;
    size_t symmetric_wins_until;
    bool crosses;
  };
  for (const Case& c :
       {Case{22809, size_t{4} << 20, true}, Case{22809, size_t{1} << 40, false}, Case{23003, size_t{4} << 20, true}}) {
    Job job(2, c.version);
    job.nccl.cost = [&](size_t bytes, bool bare) { return bare == (bytes <= c.symmetric_wins_until) ? 10 : 20; };
    job.gpus.elapsed_us = FakeNccl::LastCost;
    job.Run([&](Rank& rank, ProcessGroup& group) {
      Array a(rank, group, DType::kFloat32, size_t{8} << 20, true);
      const auto op_of = [&](size_t bytes, ReduceOp op) {
        const Buffer b{a.whole().data, bytes / 4, DType::kFloat32, rank.device()};
        RANK_CHECK_OK(group.AllReduce(b, b, {.op = op}, kNoStream).Wait());
        return rank.nccl.last_op(rank.rank);
      };
      RANK_CHECK_EQ(op_of(1024, ReduceOp::kSum), nccl::kSum);
      RANK_CHECK_EQ(op_of(1024, ReduceOp::kAvg), nccl::kSum);
      // From between 4 MiB, where they win, and 16, where they lose.
      RANK_CHECK_EQ(op_of(size_t{16} << 20, ReduceOp::kSum), c.crosses ? 100 : nccl::kSum);
      RANK_CHECK_EQ(op_of(size_t{16} << 20, ReduceOp::kAvg), c.crosses ? 100 : nccl::kSum);
      const Buffer two{a.whole().data, 2, DType::kFloat32, rank.device()};
      const Buffer one{static_cast<float*>(two.data) + rank.rank, 1, two.dtype, two.device};
      RANK_CHECK_OK(group.ReduceScatter(two, one, {.op = ReduceOp::kAvg}, kNoStream).Wait());
      RANK_CHECK_EQ(rank.nccl.last_op(rank.rank), c.version >= 23003 ? nccl::kAvg : nccl::kSum);
      Array plain(rank, group, DType::kFloat32, 8, false);
      RANK_CHECK_OK(group.AllReduce(plain.Cut(1), plain.Cut(1), {.op = ReduceOp::kAvg}, kNoStream).Wait());
      RANK_CHECK_EQ(rank.nccl.last_op(rank.rank), nccl::kAvg);
    });
  }
}

TEST_CASE("a broadcast of many small ranges, as of a model's buffers, is one of NCCL's") {
  Job job(3);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const auto calls = [&] {  // of all ranks
      RANK_CHECK_OK(group.Barrier().Wait());
      const int made = rank.nccl.Calls("Broadcast");
      RANK_CHECK_OK(group.Barrier().Wait());
      return made;
    };
    struct Case {
      size_t count, ranges;
      int calls;  // of a rank
    };
    for (const Case& c : {Case{380, 38, 1}, Case{4, 4, 4}, Case{size_t{300} << 10, 5, 5}}) {
      for (const bool allocated : {false, true}) {
        Array a(rank, group, DType::kFloat32, c.count, allocated);
        for (size_t i = 0; i < c.count; ++i) a.Set(i, static_cast<double>(1000 * rank.rank) + static_cast<double>(i));
        const int before = calls();
        RANK_CHECK_OK(group.Broadcast(a.Cut(c.ranges), 2, kNoStream).Wait());
        RANK_CHECK_EQ(calls() - before, 3 * c.calls);
        for (size_t i = 0; i < c.count; ++i) RANK_CHECK_EQ(a.Get(i), 2000 + static_cast<double>(i));
      }
    }
  });
}

TEST_CASE("memory is good where NCCL does not register it") {
  for (int what : {0, 1, 2}) {
    Job job(2, what == 0 ? 22100 : 22809);  // before windows; a window that is null; one rank that fails
    job.nccl.null_windows = what == 1;
    if (what == 2) job.nccl.Plan("CommWindowRegister", 1, Mishap::kFail, nccl::kInvalidUsage);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      Array a(rank, group, DType::kFloat32, 100, true);
      RANK_CHECK_OK(group.Barrier().Wait());
      RANK_CHECK_EQ(rank.nccl.live_memory(), 0);  // that of ncclMemAlloc is slow then
      const int asked = rank.nccl.Calls("MemAlloc");
      RANK_CHECK(!RANK_VALUE(group.Allocate(200, rank.device())).registered());
      RANK_CHECK_EQ(rank.nccl.Calls("MemAlloc"), asked);
      RANK_CHECK_EQ(a.Get(99), 0);
      a.Set(0, 1);
      RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(1), {.op = ReduceOp::kAvg}, kNoStream).Wait());
      RANK_CHECK_EQ(rank.nccl.last_op(rank.rank), nccl::kAvg);
      RANK_CHECK_EQ(a.Get(0), 1);
      RANK_CHECK_OK(group.SetTimeout(TimeFor(absl::Seconds(5))));  // NCCL waits for ever if one side is registered
      Array b(rank, group, DType::kFloat32, 100, false);
      RANK_CHECK_OK(
          group.AllToAll(rank.rank == 0 ? a.Cut(1) : b.Cut(1), rank.rank == 0 ? b.Cut(1) : a.Cut(1), kNoStream).Wait());
    });
    CHECK(job.nccl.live_windows() == 0);
    CHECK(job.nccl.live_memory() == 0);
  }
}

TEST_CASE("memory that all ranks have given back is given out again, zeroed") {
  Job job(2);
  std::vector<Allocation> kept(2);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    void* address = nullptr;
    {
      Allocation first = RANK_VALUE(group.Allocate(4096, rank.device()));
      address = first.data();
      static_cast<char*>(address)[5] = 1;
      // One rank keeps it for now.
      if (rank.rank == 0) kept[0] = first;
    }
    Allocation second = RANK_VALUE(group.Allocate(4096, rank.device()));
    RANK_CHECK(second.data() != address);
    if (rank.rank == 0) kept[0] = Allocation();
    RANK_CHECK_OK(group.Barrier().Wait());
    Allocation third = RANK_VALUE(group.Allocate(4096, rank.device()));
    RANK_CHECK(third.data() == address);
    RANK_CHECK(static_cast<char*>(third.data())[5] == 0);
    RANK_CHECK_STATUS(group.Allocate(rank.rank == 0 ? 100 : 200, rank.device()), absl::StatusCode::kFailedPrecondition,
                      "rank 0 asks for 100", "rank 1 for 200");
    kept[static_cast<size_t>(rank.rank)] = second;
  });
  CHECK(job.nccl.live_memory() == 2);  // outlives the group
  kept.clear();
  CHECK(job.nccl.live_memory() == 0);
}

TEST_CASE("memory is given out again when the streams are through with it") {
  Job job(2);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    void* address = nullptr;
    int seen = 0;
    {
      const Allocation first = RANK_VALUE(group.Allocate(4096, rank.device()));
      address = first.data();
      FakeDevices::Enqueue(stream.get(), [address] { *static_cast<int*>(address) = 7; });
      FakeDevices::Enqueue(stream.get(), [address, &seen] { seen = *static_cast<int*>(address); });
    }
    const Allocation second = RANK_VALUE(group.Allocate(4096, rank.device()));
    RANK_CHECK(second.data() == address);
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(seen, 7);
    RANK_CHECK_EQ(*static_cast<int*>(second.data()), 0);
  });
}

TEST_CASE("memory of one group can be made another's") {
  Job job(2);
  std::vector<Allocation> kept(2);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    Allocation& memory = kept[static_cast<size_t>(rank.rank)];
    memory = RANK_VALUE(group.Allocate(4096, rank.device()));
    RANK_CHECK(memory.registered());
    std::unique_ptr<ProcessGroup> other = RANK_VALUE(group.Split(0, 0));
    const int windows = rank.nccl.Calls("CommWindowRegister");
    RANK_CHECK_OK(other->Register(memory));
    RANK_CHECK(rank.nccl.Calls("CommWindowRegister") > windows);
    const Buffer b = memory.View(DType::kFloat32, 0, 16);
    RANK_CHECK_OK(other->AllReduce(b, b, {.op = ReduceOp::kAvg}, kNoStream).Wait());
    RANK_CHECK_EQ(rank.nccl.last_op(rank.rank), nccl::kSum);  // by the symmetric kernels
    const Allocation cpu = RANK_VALUE(group.Allocate(64, Device{}));
    RANK_CHECK_OK(other->Register(cpu));
    RANK_CHECK_STATUS(other->Register(Allocation()), absl::StatusCode::kInvalidArgument);
    const Allocation small(std::shared_ptr<void>(memory.data(), [](void*) {}), 64, rank.device());
    const Allocation& uneven = rank.rank == 0 ? memory : small;
    RANK_CHECK_STATUS(other->Register(uneven), absl::StatusCode::kFailedPrecondition, "4096", "64");
    // A group's own memory is its own already; it must not keep itself alive.
    const int registered = rank.nccl.Calls("CommWindowRegister");
    RANK_CHECK_OK(group.Register(memory));
    RANK_CHECK_EQ(rank.nccl.Calls("CommWindowRegister"), registered);
    const Allocation others = RANK_VALUE(other->Allocate(4096, rank.device()));
    RANK_CHECK_STATUS(group.Register(rank.rank == 0 ? memory : others), absl::StatusCode::kFailedPrecondition,
                      "some ranks register memory that this group has allocated");
  });
  CHECK(job.nccl.live_windows() == 0);
  kept.clear();
  CHECK(job.nccl.live_memory() == 0);
}

TEST_CASE("GPU memory of the program's own is reduced where it lies, and not registered with NCCL") {
  Job job(2);
  for (const bool mixed : {false, true}) {  // with memory of another group's on the other rank
    job.Run([&](Rank& rank, ProcessGroup& group) {
      const size_t bytes = 64 * sizeof(float);
      const std::unique_ptr<ProcessGroup> other = RANK_VALUE(group.Split(0, 0));
      Allocation memory = RANK_VALUE(other->Allocate(bytes, rank.device()));
      if (rank.rank == 1 || !mixed) {
        memory = Allocation(RANK_VALUE(rank.gpus.Allocate(rank.device(), bytes)), bytes, rank.device());
      }
      RANK_CHECK_OK(group.Barrier().Wait());
      const int windows = rank.nccl.Calls("CommWindowRegister");
      RANK_CHECK_OK(group.Register(memory));
      RANK_CHECK_EQ(rank.nccl.Calls("CommWindowRegister"), windows);
      const Buffer half = memory.View(DType::kFloat32, bytes / 2, 32);
      std::optional<AllocatedRange> found = FindAllocation(group, half.data, bytes / 2);
      RANK_CHECK(found.has_value() && found->offset == bytes / 2);
      for (int i = 0; i < 32; ++i) static_cast<float*>(half.data)[i] = 1.0F + static_cast<float>(rank.rank);
      RANK_CHECK_OK(group.AllReduce(half, half, {.op = ReduceOp::kAvg}, kNoStream).Wait());
      RANK_CHECK_EQ(static_cast<float*>(half.data)[31], 1.5F);
      RANK_CHECK_EQ(rank.nccl.last_op(rank.rank), nccl::kAvg);  // as plain memory
      found.reset();
      memory = Allocation();
      if (rank.rank == 1) RANK_CHECK(!FindAllocation(group, half.data, bytes / 2).has_value());
    });
  }
}

TEST_CASE("no memory left is an error on all ranks, and nothing sticks") {
  Job job(2);
  job.nccl.Plan("MemAlloc", 0, Mishap::kFail, nccl::kUnhandledCudaError);
  job.Run([](Rank& rank, ProcessGroup& group) {
    RANK_CHECK_STATUS(group.Allocate(100, rank.device()), absl::StatusCode::kResourceExhausted, "100 bytes");
    RANK_CHECK_OK(group.Allocate(100, rank.device()));
  });
  Job old(2, 21803);  // in which NCCL does not allocate
  old.Run([](Rank& rank, ProcessGroup& group) {
    const size_t bytes = size_t{1} << 60;
    RANK_CHECK_STATUS(group.Allocate(bytes, rank.device()), absl::StatusCode::kResourceExhausted,
                      absl::StrCat("no ", bytes, " bytes of GPU memory left"), "rank ");
    RANK_CHECK_OK(group.Allocate(100, rank.device()));
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
