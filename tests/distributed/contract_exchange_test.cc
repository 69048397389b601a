// SPDX-License-Identifier: Apache-2.0
// The contract of ProcessGroup, part 5: all-gather of uneven parts, all-to-all, and groups made from groups.
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

double Value(DType dtype, int rank, size_t i) { return WholeNumber(dtype, ReduceOp::kSum, rank, i); }

// Rank r gives so many.
std::vector<size_t> Uneven(int size, size_t base) {
  std::vector<size_t> counts;
  for (int r = 0; r < size; ++r) counts.push_back(r % 3 == 1 ? 0 : base * static_cast<size_t>(r + 1) + 1);
  return counts;
}

void CheckAllGatherV(Rank& rank, DType dtype, Placement placement, const std::vector<size_t>& counts, bool in_place,
                     int pieces) {
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  const size_t mine = counts[static_cast<size_t>(rank.rank())];
  const size_t begin = std::accumulate(counts.begin(), counts.begin() + rank.rank(), size_t{0});
  Memory out(rank, placement, dtype, total);
  Memory other(rank, placement, dtype, *std::max_element(counts.begin(), counts.end()));
  out.Fill(99);
  for (size_t i = 0; i < mine; ++i) {
    in_place ? out.Set(begin + i, Value(dtype, rank.rank(), i)) : other.Set(i, Value(dtype, rank.rank(), i));
  }
  const unsigned seed = static_cast<unsigned>(rank.rank() + 3);
  const std::vector<Buffer> ins = in_place ? out.Cut(begin, mine, pieces, seed) : other.Cut(0, mine, pieces, seed);
  const std::vector<Buffer> outs = in_place ? std::vector<Buffer>{out.whole()} : out.Cut(pieces, seed + 1);
  RANK_CHECK_OK(rank.group().AllGather(ins, outs, counts).Wait());
  size_t at = 0;
  for (int r = 0; r < rank.size(); ++r) {
    for (size_t i = 0; i < counts[static_cast<size_t>(r)]; ++i) RANK_CHECK_EQ(out.Get(at++), Value(dtype, r, i));
  }
}

TEST_CASE("all-gather of uneven parts in every dtype, placement and split") {
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      for (const bool in_place : {true, false}) {
        for (const DType dtype : kCallDTypes) {
          CheckAllGatherV(rank, dtype, placement, Uneven(rank.size(), 301), in_place, 1);
          CheckAllGatherV(rank, dtype, placement, Uneven(rank.size(), 7), in_place, 3);
        }
        CheckAllGatherV(rank, DType::kFloat32, placement, std::vector<size_t>(rank.size(), 0), in_place, 1);
        CheckAllGatherV(rank, DType::kFloat32, placement, std::vector<size_t>(rank.size(), 5), in_place, 1);
        CheckAllGatherV(rank, DType::kFloat32, placement, Uneven(rank.size(), 170'001), in_place, 4);
      }
    }
    std::vector<size_t> large;  // more than 2 MiB, in one range on each rank
    for (int r = 0; r < rank.size(); ++r) large.push_back(static_cast<size_t>(140'001 - 100 * r));
    CheckAllGatherV(rank, DType::kFloat64, Placement::kOrdinary, large, false, 1);
  });
}

void CheckAllToAll(Rank& rank, DType dtype, Placement placement, size_t part, bool in_place, int pieces) {
  const size_t size = static_cast<size_t>(rank.size()), me = static_cast<size_t>(rank.rank());
  Memory in(rank, placement, dtype, part * size);
  Memory other(rank, placement, dtype, in_place ? 0 : part * size);
  Memory& out = in_place ? in : other;
  out.Fill(99);
  for (size_t i = 0; i < in.count(); ++i) in.Set(i, Value(dtype, rank.rank(), i));
  const unsigned seed = static_cast<unsigned>(rank.rank() + 5);
  const std::vector<Buffer> ins = in.Cut(pieces, seed);
  RANK_CHECK_OK((rank.group().AllToAll(ins, in_place ? ins : out.Cut(pieces, seed + 1))).Wait());
  for (int r = 0; r < rank.size(); ++r) {
    for (size_t i = 0; i < part; ++i) {
      RANK_CHECK_EQ(out.Get(static_cast<size_t>(r) * part + i), Value(dtype, r, me * part + i));
    }
  }
}

TEST_CASE("all-to-all in every dtype, placement and split") {
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      for (const bool in_place : {true, false}) {
        for (const DType dtype : kCallDTypes) {
          CheckAllToAll(rank, dtype, placement, 1, in_place, 1);
          CheckAllToAll(rank, dtype, placement, 517, in_place, 4);
        }
        CheckAllToAll(rank, DType::kFloat32, placement, 0, in_place, 1);
        CheckAllToAll(rank, DType::kFloat32, placement, 1'501, in_place, 3);
        CheckAllToAll(rank, DType::kFloat32, placement, 120'001, in_place, 1);
      }
    }
    CheckAllToAll(rank, DType::kFloat64, Placement::kOrdinary, 140'001, false, 1);  // more than 2 MiB in one range
  });
}

// A part of the output lies where a part of the input does, though the two do not begin at one address.
void CheckAllToAllPartlyInPlace(Rank& rank, Placement placement, size_t part, bool same_tail) {
  const size_t size = static_cast<size_t>(rank.size()), me = static_cast<size_t>(rank.rank()), count = part * size;
  const size_t half = count / 2;
  Memory in(rank, placement, DType::kInt32, count), other(rank, placement, DType::kInt32, count);
  for (size_t i = 0; i < count; ++i) in.Set(i, Value(DType::kInt32, rank.rank(), i));
  const Buffer empty = {nullptr, 0, DType::kInt32, {}}, tail = in.Range(half, count - half);
  std::vector<Buffer> ins = {empty, in.whole()}, outs = {in.whole()};
  if (same_tail) {
    ins = {in.Range(0, half), tail};
    outs = {other.Range(0, half), tail};
  }
  RANK_CHECK_OK(rank.group().AllToAll(ins, outs).Wait());
  for (size_t i = 0; i < count; ++i) {
    const Memory& out = same_tail && i < half ? other : in;
    RANK_CHECK_EQ(out.Get(i), Value(DType::kInt32, static_cast<int>(i / part), me * part + i % part));
  }
  for (size_t i = 0; same_tail && i < half; ++i) RANK_CHECK_EQ(in.Get(i), Value(DType::kInt32, rank.rank(), i));
}

TEST_CASE("all-to-all of which a part alone is in place") {
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      for (const size_t part : {size_t{7}, size_t{70'001}}) {
        for (const bool same_tail : {false, true}) CheckAllToAllPartlyInPlace(rank, placement, part, same_tail);
      }
    }
  });
}

TEST_CASE("all-gathers and all-to-alls in flight with reductions") {
  RunOnRanks([](Rank& rank) {
    constexpr size_t kEach = 1000;
    const size_t size = static_cast<size_t>(rank.size());
    for (const Placement placement : {Placement::kAllocated, Placement::kMixed}) {
      Memory m(rank, placement, DType::kFloat32, kEach);
      Memory gathered(rank, placement, DType::kFloat32, kEach * size);
      Memory turned(rank, placement, DType::kFloat32, kEach * size);
      const std::vector<size_t> counts(size, kEach);
      std::vector<Work> works;
      m.Fill(1);
      for (int k = 0; k < 50; ++k) {
        // Each works on the result of the one before.
        works.push_back(rank.group().AllGather(m.whole(), gathered.whole(), counts));
        works.push_back(rank.group().AllToAll(gathered.whole(), turned.whole()));
        const size_t next = static_cast<size_t>(k) % size;
        const Buffer part = turned.Range(next * kEach, kEach);
        works.push_back(rank.group().AllReduce(part, m.whole(), {.op = ReduceOp::kAvg}));
      }
      for (Work& work : works) RANK_CHECK_OK(work.Wait());
      for (size_t i = 0; i < kEach; ++i) RANK_CHECK_EQ(m.Get(i), 1.0);
    }
  });
}

TEST_CASE("mistakes in uneven gathers and all-to-alls are InvalidArgument and do no harm") {
  RunOnRanks([](Rank& rank) {
    ProcessGroup& group = rank.group();
    const size_t size = static_cast<size_t>(rank.size());
    Memory m(rank, Placement::kAllocated, DType::kFloat32, 20 * size);
    Memory ints(rank, Placement::kAllocated, DType::kInt32, 20 * size);
    const Buffer ten = m.Range(0, 10), all = m.Range(10, 10 * size);
    const std::vector<size_t> counts(size, 10);
    const auto wrong = [&](const Work& work, const char* call, const char* what) {
      RANK_CHECK_STATUS(work, StatusCode::kInvalidArgument, absl::StrCat("rank ", rank.rank()), call, what);
    };
    wrong(group.AllGather(ten, all, absl::Span<const size_t>()), "all_gather_v", "0 counts");
    wrong(group.AllGather(m.Range(0, 9), all, counts), "all_gather_v", "9 elements");
    wrong(group.AllGather(ten, m.Range(9, 10 * size + 1), counts), "all_gather_v", "the counts come to");
    wrong(group.AllGather(ints.Range(0, 10), all, counts), "all_gather_v", "types");
    wrong(group.AllToAll(ints.Range(0, 10 * size), all), "all_to_all", "types");
    wrong(group.AllToAll(m.Range(0, size), m.Range(0, 2 * size)), "all_to_all", "elements");
    wrong(group.AllToAll(m.Range(0, 2 * size), m.Range(size, 2 * size)), "all_to_all", "overlap");
    if (size > 1) {
      wrong(group.AllToAll(m.Range(0, size + 1), ints.Range(0, size + 1)), "all_to_all", "types");
      wrong(group.AllToAll(m.Range(0, size + 1), m.Range(2 * size, size + 1)), "all_to_all", "equal parts");
    }
    RANK_CHECK_OK(group.AllGather(ten, all, counts).Wait());
  });
}

// Other counts on the last rank, the same in all.
std::vector<size_t> LastDiffers(const Rank& rank) {
  std::vector<size_t> counts(static_cast<size_t>(rank.size()), 4);
  if (rank.rank() == rank.size() - 1) {
    counts[0] = 3;
    counts[1] = 5;
  }
  return counts;
}

TEST_CASE("ranks that disagree about counts all learn of it") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    Memory m(rank, Placement::kAllocated, DType::kFloat32, 100);
    const std::vector<size_t> counts = LastDiffers(rank);
    const size_t mine = counts[static_cast<size_t>(rank.rank())];
    rank.Meet();  // nobody is still getting its memory when the group fails
    RANK_CHECK_STATUS(rank.group().AllGather(m.Range(90, mine), m.Range(0, 4 * counts.size()), counts).Wait(),
                      StatusCode::kFailedPrecondition, "all_gather_v", "counts", " calls ",
                      absl::StrCat("rank ", rank.size() - 1));
  });
}

TEST_CASE("ranks that disagree about the parts of a reduce-scatter all learn of it", "[host]") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    Memory m(rank, Placement::kAllocated, DType::kFloat32, 100);
    const std::vector<size_t> counts = LastDiffers(rank);
    rank.Meet();
    const Buffer mine = m.Range(90, counts[static_cast<size_t>(rank.rank())]);
    RANK_CHECK_STATUS(rank.group().ReduceScatter(m.Range(0, 4 * counts.size()), mine, counts).Wait(),
                      StatusCode::kFailedPrecondition, "reduce_scatter_v(sum", "counts", " calls ",
                      absl::StrCat("rank ", rank.size() - 1));
  });
}

// --- groups made from groups ----------------------------------------------------------------------------------------

// The sum of a value over a group, by an all-reduce.
double Sum(ProcessGroup& group, double value) {
  const Buffer buffer{&value, 1, DType::kFloat64, {}};
  RANK_CHECK_OK(group.AllReduce(buffer, buffer).Wait());
  return value;
}

TEST_CASE("Split orders by key, then by rank") {
  RunOnRanks([](Rank& rank) {
    const auto same = RANK_VALUE(rank.group().Split(0, 7));
    RANK_CHECK_EQ(same->rank(), rank.rank());
    RANK_CHECK_EQ(same->size(), rank.size());
    const auto reversed = RANK_VALUE(rank.group().Split(5, -rank.rank()));
    RANK_CHECK_EQ(reversed->rank(), rank.size() - 1 - rank.rank());
    RANK_CHECK_EQ(Sum(*same, rank.rank()), Sum(*reversed, rank.rank()));
    const auto alone = RANK_VALUE(rank.group().Split(rank.rank(), 0));
    RANK_CHECK_EQ(alone->size(), 1);
    RANK_CHECK_EQ(Sum(*alone, rank.rank()), static_cast<double>(rank.rank()));
  });
}

TEST_CASE("uneven Split, with ranks that get no group") {
  RunOnRanks([](Rank& rank) {
    // Rank 0 gets none, rank 1 its own, the others one together.
    const int color = rank.rank() == 0 ? -1 : std::min(rank.rank(), 2);
    const auto part = RANK_VALUE(rank.group().Split(color, 0));
    RANK_CHECK_EQ(part == nullptr, rank.rank() == 0);
    if (part != nullptr) {
      RANK_CHECK_EQ(part->size(), color == 1 ? 1 : rank.size() - 2);
      RANK_CHECK_EQ(Sum(*part, 1), static_cast<double>(part->size()));
    }
    RANK_CHECK_EQ(Sum(rank.group(), 1), static_cast<double>(rank.size()));
    RANK_CHECK(RANK_VALUE(rank.group().Split(-1, 0)) == nullptr);
  });
}

TEST_CASE("operations of a group and of its parts, interleaved and in flight") {
  RunOnRanks([](Rank& rank) {
    const int color = rank.rank() % 2;
    const auto half = RANK_VALUE(rank.group().Split(color, 0));
    const auto nested = RANK_VALUE(half->Split(0, -half->rank()));
    constexpr size_t kEach = 20'000;
    for (const Placement placement : kAllPlacements) {
      Memory m(rank, placement, DType::kFloat32, 3 * kEach);
      const Allocation own = RANK_VALUE(half->Allocate(kEach * sizeof(float), Device{}));
      m.Fill(1);
      std::fill_n(static_cast<float*>(own.data()), kEach, 1.0F);
      std::vector<Work> works;
      ProcessGroup* const groups[] = {&rank.group(), half.get(), nested.get()};
      const Buffer shared = own.View(DType::kFloat32, 0, kEach);
      for (int k = 0; k < 4; ++k) {
        for (size_t g = 0; g < 3; ++g) {
          const Buffer b = m.Range(g * kEach, kEach);
          works.push_back(groups[g]->AllReduce(b, b));
        }
        works.push_back(half->AllReduce(shared, shared));
      }
      std::reverse(works.begin(), works.end());
      for (Work& work : works) RANK_CHECK_OK(work.Wait());
      for (size_t g = 0; g < 3; ++g) {
        double expected = 1;
        for (int k = 0; k < 4; ++k) expected *= groups[g]->size();
        for (size_t i = 0; i < kEach; ++i) RANK_CHECK_EQ(m.Get(g * kEach + i), expected);
        if (g == 1) RANK_CHECK_EQ(static_cast<double>(static_cast<float*>(own.data())[kEach - 1]), expected);
      }
    }
  });
}

TEST_CASE("a part may outlive its group, and fails alone") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    auto whole = RANK_VALUE(rank.group().Split(0, 0));
    const auto part = RANK_VALUE(whole->Split(0, 0));
    const auto other = RANK_VALUE(whole->Split(0, 0));
    whole.reset();
    RANK_CHECK_EQ(Sum(*part, 1), static_cast<double>(rank.size()));
    rank.Meet();
    if (rank.rank() == 0) part->Abort(absl::CancelledError("enough"));
    rank.Meet();
    RANK_CHECK_STATUS(part->Barrier().Wait(), StatusCode::kAborted, "enough");
    RANK_CHECK_STATUS(part->Split(0, 0), StatusCode::kAborted, "enough");
    RANK_CHECK_EQ(Sum(*other, 1), static_cast<double>(rank.size()));
    RANK_CHECK_EQ(Sum(rank.group(), 1), static_cast<double>(rank.size()));
  });
}

// What this process holds. Bytes of malloc are 0 under AddressSanitizer.
struct Holdings {
  size_t files = 0, threads = 0, mappings = 0, bytes = 0;

  static Holdings Now() {
    Holdings now{.files = EntriesOf("/proc/self/fd"), .threads = EntriesOf("/proc/self/task")};
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) now.mappings += absl::StrContains(line, "ddp") ? 1 : 0;
    const struct mallinfo2 heap = mallinfo2();
    now.bytes = heap.uordblks + heap.hblkhd;
    return now;
  }
};

TEST_CASE("groups that are made and destroyed leave nothing behind") {
  if (!OnOneNode()) return;  // MPI keeps connections and buffers
  RunOnRanks([](Rank& rank) {
    const auto make = [&](int count) {
      for (int i = 0; i < count; ++i) {
        const auto group = RANK_VALUE(rank.group().Split(0, rank.rank()));
        const Allocation memory = RANK_VALUE(group->Allocate(100'000, Device{}));
        std::fill_n(static_cast<float*>(memory.data()), 25'000, 1.0F);
        const Buffer buffer = memory.View(DType::kFloat32, 0, 25'000);
        RANK_CHECK_OK(group->AllReduce(buffer, buffer).Wait());
        RANK_CHECK_EQ(static_cast<float*>(memory.data())[24'999], static_cast<float>(rank.size()));
        RANK_CHECK_OK(group->Barrier().Wait());
      }
      rank.Meet();
    };
    constexpr int kGroups = 40;
    const bool looks = !RanksAreThreads() || rank.rank() == 0;  // one at a time: looking opens files
    make(3);
    const Holdings before = looks ? Holdings::Now() : Holdings();
    rank.Meet();
    make(kGroups);
    // Tables grow, by a quarter of a KiB a group and rank, and so does, up to a limit, what the C library keeps of the
    // threads that have been simulated GPUs' streams.
    const size_t grown = (32 << 10) + static_cast<size_t>(kGroups * rank.size() * 512);
    Holdings after = looks ? Holdings::Now() : Holdings();
    // A simulated GPU gives memory back when a stream has come to the end of its work.
    for (int i = 0; i < 500 && after.bytes >= before.bytes + grown; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      after = Holdings::Now();
    }
    if (looks) after.threads = ThreadsLeft(before.threads);
    rank.Meet();
    if (!looks) return;
    RANK_CHECK_EQ(after.files, before.files);
    RANK_CHECK(after.threads <= before.threads, before.threads, " threads, then ", after.threads);
    RANK_CHECK_EQ(after.mappings, before.mappings);
    RANK_CHECK(after.bytes < before.bytes + grown, before.bytes, " bytes, then ", after.bytes);
  });
}

TEST_CASE("a Split that one rank does not make times out and names it", "[timeout]") {
  if (RankCount() == 1) return;
  RunWithTimeout(absl::Milliseconds(1500), [](Rank& rank) {
    const int late = rank.size() - 1;
    const auto check = [&] {
      const absl::Status status = rank.group().Split(0, 0).status();
      RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "rank");
      const std::vector<int> blamed = FailedRanks(status);  // others may have been slow
      RANK_CHECK(std::find(blamed.begin(), blamed.end(), late) != blamed.end(), status.ToString());
    };
    if (rank.rank() != late) check();
    rank.Meet();
    check();
  });
}

}  // namespace
}  // namespace ddp::testing
