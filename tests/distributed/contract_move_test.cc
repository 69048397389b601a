// SPDX-License-Identifier: Apache-2.0
// The contract of ProcessGroup, part 2: moving data, meeting, and memory.
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

double Value(DType dtype, int rank, size_t i) { return WholeNumber(dtype, ReduceOp::kSum, rank, i); }

TEST_CASE("broadcast from every root") {
  RunOnRanks([](Rank& rank) {
    for (const DType dtype : kCallDTypes) {
      for (const Placement placement : kAllPlacements) {
        for (int root = 0; root < rank.size(); ++root) {
          for (const size_t count : {size_t{0}, size_t{1}, size_t{1001}}) {
            Memory m(rank, placement, dtype, count);
            for (size_t i = 0; i < count; ++i) m.Set(i, Value(dtype, rank.rank(), i));
            const std::vector<Buffer> ranges = m.Cut(3, static_cast<unsigned>(rank.rank()));
            RANK_CHECK_OK(rank.group().Broadcast(ranges, root).Wait());
            for (size_t i = 0; i < count; ++i) RANK_CHECK_EQ(m.Get(i), Value(dtype, root, i));
          }
        }
      }
    }
  });
}

TEST_CASE("broadcast of many chunks") {
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      const int root = rank.size() - 1;
      Memory m(rank, placement, DType::kFloat32, 700'001);
      for (size_t i = 0; i < m.count(); ++i) m.Set(i, Value(DType::kFloat32, rank.rank(), i));
      RANK_CHECK_OK(rank.group().Broadcast(m.whole(), root).Wait());
      for (size_t i = 0; i < m.count(); ++i) RANK_CHECK_EQ(m.Get(i), Value(DType::kFloat32, root, i));
    }
  });
}

void CheckAllGather(Rank& rank, DType dtype, Placement placement, size_t count, bool in_place, int pieces) {
  const size_t size = static_cast<size_t>(rank.size());
  const size_t me = static_cast<size_t>(rank.rank());
  Memory out(rank, placement, dtype, count * size);
  Memory other(rank, placement, dtype, in_place ? 0 : count);
  out.Fill(99);
  const unsigned seed = static_cast<unsigned>(rank.rank() + 3);
  const std::vector<Buffer> ins = in_place ? out.Cut(me * count, count, pieces, seed) : other.Cut(pieces, seed);
  for (size_t i = 0; i < count; ++i) {
    in_place ? out.Set(me * count + i, Value(dtype, rank.rank(), i)) : other.Set(i, Value(dtype, rank.rank(), i));
  }
  std::vector<Buffer> outs;
  if (in_place) {
    outs.push_back(out.Range(0, me * count));
    outs.insert(outs.end(), ins.begin(), ins.end());
    outs.push_back(out.Range((me + 1) * count, (size - me - 1) * count));
  } else {
    outs = out.Cut(pieces, seed + 1);
  }
  RANK_CHECK_OK(rank.group().AllGather(ins, outs).Wait());
  for (int r = 0; r < rank.size(); ++r) {
    for (size_t i = 0; i < count; ++i) {
      RANK_CHECK_EQ(out.Get(static_cast<size_t>(r) * count + i), Value(dtype, r, i));
    }
  }
}

TEST_CASE("all-gather in every dtype, placement and split") {
  RunOnRanks([](Rank& rank) {
    for (const DType dtype : kCallDTypes) {
      for (const Placement placement : kAllPlacements) {
        for (const bool in_place : {true, false}) {
          CheckAllGather(rank, dtype, placement, 0, in_place, 1);
          CheckAllGather(rank, dtype, placement, 1, in_place, 2);
          CheckAllGather(rank, dtype, placement, 517, in_place, 1);
          CheckAllGather(rank, dtype, placement, 517, in_place, 4);
        }
      }
    }
    for (const Placement placement : kAllPlacements) {
      for (const bool in_place : {true, false}) CheckAllGather(rank, DType::kFloat32, placement, 2'501, in_place, 3);
      CheckAllGather(rank, DType::kFloat32, placement, 150'001, false, 5);
      CheckAllGather(rank, DType::kFloat32, placement, 150'001, true, 5);
    }
    for (const bool in_place : {true, false}) {  // more than 2 MiB in one range
      CheckAllGather(rank, DType::kFloat64, Placement::kOrdinary, 140'001, in_place, 1);
    }
  });
}

TEST_CASE("a barrier ends when the last rank has come, not before") {
  RunOnRanks([](Rank& rank) {
    for (int late = 0; late < rank.size(); ++late) {
      Work work;
      if (rank.rank() != late) work = rank.group().Barrier();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (rank.rank() != late) RANK_CHECK(!work.Done());
      rank.Meet();
      if (rank.rank() == late) work = rank.group().Barrier();
      RANK_CHECK_OK(work.Wait());
      RANK_CHECK(work.Done());
    }
  });
}

bool IsFilled(const char* data, size_t bytes, char value) {
  return data[0] == value && std::memcmp(data, data + 1, bytes - 1) == 0;
}

TEST_CASE("allocated memory is zero, page-aligned and each rank's own", "[host]") {
  RunOnRanks([](Rank& rank) {
    std::vector<Allocation> kept;
    for (const size_t bytes : {size_t{1}, size_t{100}, size_t{4096}, size_t{3'000'001}, size_t{20'000'000}}) {
      const Allocation memory = RANK_VALUE(rank.group().Allocate(bytes, Device{}));
      RANK_CHECK_EQ(memory.bytes(), bytes);
      RANK_CHECK(memory.device() == Device{});
      RANK_CHECK_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, uintptr_t{0});
      const char* data = static_cast<const char*>(memory.data());
      RANK_CHECK(IsFilled(data, bytes, 0));
      std::memset(memory.data(), 'a' + rank.rank(), bytes);
      kept.push_back(memory);
    }
    RANK_CHECK_OK(rank.group().Barrier().Wait());
    for (const Allocation& memory : kept) {
      const char* data = static_cast<const char*>(memory.data());
      RANK_CHECK(IsFilled(data, memory.bytes(), static_cast<char>('a' + rank.rank())));
    }
  });
}

TEST_CASE("memory that was given back is zero when it is allocated again") {
  RunOnRanks([](Rank& rank) {
    for (int round = 0; round < 20; ++round) {
      const Allocation memory = RANK_VALUE(rank.group().Allocate(2'000'000, Device{}));
      char* data = static_cast<char*>(memory.data());
      RANK_CHECK(IsFilled(data, memory.bytes(), 0));
      std::memset(data, 1, memory.bytes());
      const Buffer whole = memory.View(DType::kInt8, 0, memory.bytes());
      RANK_CHECK_OK(rank.group().AllReduce(whole, whole).Wait());
      RANK_CHECK_EQ(static_cast<int>(data[memory.bytes() - 1]), rank.size());
    }
  });
}

TEST_CASE("an allocation outlives its group") {
  std::vector<Allocation> kept(static_cast<size_t>(RankCount()));
  RunOnRanks([&](Rank& rank) {
    Allocation& memory = kept[static_cast<size_t>(rank.rank())];
    memory = RANK_VALUE(rank.group().Allocate(300'000, Device{}));
    std::memset(memory.data(), 1 + rank.rank(), memory.bytes());
    const Buffer whole = memory.View(DType::kInt8, 0, memory.bytes());
    RANK_CHECK_OK(rank.group().Broadcast(whole, 0).Wait());
  });
  for (Allocation& memory : kept) {
    if (memory.data() == nullptr) continue;  // another process's
    const char* data = static_cast<const char*>(memory.data());
    CHECK(data[0] == 1);
    CHECK(data[memory.bytes() - 1] == 1);
    std::memset(memory.data(), 9, memory.bytes());
  }
}

TEST_CASE("the world says who is who") {
  RunOnRanks([](Rank& rank) {
    RANK_CHECK_EQ(rank.group().rank(), rank.context().rank());
    RANK_CHECK_EQ(rank.group().size(), RankCount());
    RANK_CHECK_EQ(rank.context().local_rank(), rank.rank());
    RANK_CHECK_EQ(rank.context().local_world_size(), rank.size());
    RANK_CHECK_EQ(rank.context().launcher(), RanksAreThreads() ? "options" : "mpirun");
    const absl::string_view backend = rank.group().backend();
    RANK_CHECK(backend == "hierarchical" || (backend == "local" && rank.size() == 1), backend);
    RANK_CHECK_OK(rank.group().status());
    // Ranks differ: each is there exactly once.
    Memory seen(rank, Placement::kOrdinary, DType::kInt32, static_cast<size_t>(rank.size()));
    Memory mine(rank, Placement::kOrdinary, DType::kInt32, 1);
    mine.Set(0, rank.rank());
    RANK_CHECK_OK(rank.group().AllGather(mine.whole(), seen.whole()).Wait());
    for (int r = 0; r < rank.size(); ++r) RANK_CHECK_EQ(seen.Get(static_cast<size_t>(r)), static_cast<double>(r));
  });
}

TEST_CASE("the hierarchical backend serves a world of any size, the local one a world of one", "[host]") {
  ContextOptions options;
  options.backend = "hierarchical";
  RunOnRanks([](Rank& rank) { RANK_CHECK_EQ(rank.group().backend(), "hierarchical"); }, options);
  if (RankCount() > 1) return;
  options.backend = "local";
  RunOnRanks([](Rank& rank) { RANK_CHECK_EQ(rank.group().backend(), "local"); }, options);
}

}  // namespace
}  // namespace ddp::testing
