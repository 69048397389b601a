// SPDX-License-Identifier: Apache-2.0
// Operations with a root, and what collectives.h makes of a group's operations.
#include "ddp/collectives.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

double Value(DType dtype, int rank, size_t i) { return WholeNumber(dtype, ReduceOp::kSum, rank, i); }

TEST_CASE("Reduce gives every root what AllReduce gives all, and leaves the inputs alone") {
  RunOnRanks([](Rank& rank) {
    for (const DType dtype : kAllDTypes) {
      for (const Placement placement : kAllPlacements) {
        for (const size_t count : {size_t{0}, size_t{1}, size_t{1001}}) {
          for (int root = 0; root < rank.size(); ++root) {
            Memory in(rank, placement, dtype, count), out(rank, placement, dtype, count);
            for (size_t i = 0; i < count; ++i) in.Set(i, Value(dtype, rank.rank(), i));
            const std::vector<Buffer> ins = in.Cut(3, 1);
            const std::vector<Buffer> outs = out.Cut(2, 2);
            RANK_CHECK_OK(rank.group().Reduce(ins, rank.rank() == root ? outs : Buffers(), root).Wait());
            for (size_t i = 0; i < count; ++i) {
              RANK_CHECK_EQ(in.Get(i), Value(dtype, rank.rank(), i));
              double sum = 0;
              for (int r = 0; r < rank.size(); ++r) sum += Value(dtype, r, i);
              if (rank.rank() == root) RANK_CHECK_EQ(out.Get(i), sum);
            }
          }
        }
      }
    }
  });
}

TEST_CASE("A Reduce whose Work is dropped at once writes to no memory but its own") {
  RunOnRanks([](Rank& rank) {
    constexpr size_t kCount = 5000;
    constexpr char kMine = 'm';
    std::vector<float> in(kCount, 1), out(kCount);
    const Buffer from{in.data(), kCount, DType::kFloat32, {}}, to{out.data(), kCount, DType::kFloat32, {}};
    std::deque<std::vector<char>> others;  // which would be where the operation's memory was
    char byte = 0;
    const Buffer message{&byte, 1, DType::kUInt8, {}};
    const bool root = rank.rank() == 0;
    // The root comes last, so that no operation is done when its Work goes.
    for (int r = 1; root && r < rank.size(); ++r) RANK_CHECK_OK(rank.group().Recv(message, r, 7).Wait());
    for (int i = 0; i < 20; ++i) {
      rank.group().Reduce(from, root ? Buffers(to) : Buffers(), 0);
      others.emplace_back(kCount * sizeof(float), kMine);
    }
    if (!root) RANK_CHECK_OK(rank.group().Send(message, 0, 7).Wait());
    RANK_CHECK_OK(rank.group().Barrier().Wait());
    for (const std::vector<char>& memory : others) {
      RANK_CHECK(std::all_of(memory.begin(), memory.end(), [](char c) { return c == kMine; }));
    }
    for (const float sum : out) RANK_CHECK_EQ(sum, root ? static_cast<float>(rank.size()) : 0);
  });
}

TEST_CASE("Gather and Scatter, with every root, also in place") {
  RunOnRanks([](Rank& rank) {
    const size_t size = static_cast<size_t>(rank.size());
    for (const DType dtype : kAllDTypes) {
      for (const Placement placement : kAllPlacements) {
        for (const size_t count : {size_t{0}, size_t{1}, size_t{1001}, size_t{30'000}}) {
          if (count == 30'000 && dtype != DType::kFloat32) continue;
          for (int root = 0; root < rank.size(); ++root) {
            for (const bool in_place : {true, false}) {
              const bool at_root = rank.rank() == root;
              Memory whole(rank, placement, dtype, count * size), other(rank, placement, dtype, count);
              const size_t own = count * static_cast<size_t>(rank.rank());
              const Buffer mine = at_root && in_place ? whole.Range(own, count) : other.whole();
              for (size_t i = 0; i < count; ++i) SetElement(dtype, mine.data, i, Value(dtype, rank.rank(), i));
              const std::vector<Buffer> parts = at_root ? whole.Cut(4, 9) : std::vector<Buffer>();
              RANK_CHECK_OK(rank.group().Gather(mine, parts, root).Wait());
              for (size_t k = 0; at_root && k < whole.count(); ++k) {
                RANK_CHECK_EQ(whole.Get(k), Value(dtype, static_cast<int>(k / count), k % count));
              }
              if (!in_place || !at_root) other.Fill(99);
              RANK_CHECK_OK(rank.group().Scatter(parts, mine, root).Wait());
              for (size_t i = 0; i < count; ++i) {
                RANK_CHECK_EQ(GetElement(dtype, mine.data, i), Value(dtype, rank.rank(), i));
              }
            }
          }
        }
      }
    }
  });
}

TEST_CASE("several operations with roots are under way at once") {
  RunOnRanks([](Rank& rank) {
    constexpr size_t kCount = 5000;
    const size_t size = static_cast<size_t>(rank.size());
    std::deque<Memory> wholes, parts;
    for (int root = 0; root < rank.size(); ++root) {
      parts.emplace_back(rank, Placement::kOrdinary, DType::kInt32, kCount);
      wholes.emplace_back(rank, Placement::kOrdinary, DType::kInt32, kCount * size);
      parts.back().Fill(10 * root + rank.rank());
    }
    for (const bool gather : {true, false}) {
      std::vector<Work> works;
      for (size_t k = 0; k < size; ++k) {
        const int root = static_cast<int>(k);
        works.push_back(gather ? rank.group().Gather(parts[k].whole(), wholes[k].whole(), root)
                               : rank.group().Scatter(wholes[k].whole(), parts[k].whole(), root));
      }
      for (Work& work : works) RANK_CHECK_OK(work.Wait());
      for (const Work& work : works) RANK_CHECK(work.Done());
      if (gather) {
        for (Memory& part : parts) part.Fill(-1);
      }
    }
    for (int root = 0; root < rank.size(); ++root) {
      RANK_CHECK_EQ(parts[static_cast<size_t>(root)].Get(kCount - 1), 10.0 * root + rank.rank());
    }
  });
}

// Part [s][r] of a matrix of counts: what rank s gives rank r. Some are empty.
size_t Given(size_t s, size_t r) { return (3 * s + 5 * r) % 7 * 150; }

TEST_CASE("all-to-all with counts moves every part to its place") {
  RunOnRanks([](Rank& rank) {
    const size_t n = static_cast<size_t>(rank.size()), me = static_cast<size_t>(rank.rank());
    for (const DType dtype : kAllDTypes) {
      for (const Placement placement : kAllPlacements) {
        std::vector<size_t> sends, receives;
        for (size_t r = 0; r < n; ++r) sends.push_back(Given(me, r)), receives.push_back(Given(r, me));
        Memory in(rank, placement, dtype, 900 * n), out(rank, placement, dtype, 900 * n);  // equal on all ranks
        const auto cut = [](const Memory& memory, const std::vector<size_t>& counts) -> std::vector<Buffer> {
          const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
          return {memory.Range(0, total / 3), memory.Range(total / 3, total - total / 3)};
        };
        for (size_t r = 0, at = 0; r < n; ++r) {
          for (size_t i = 0; i < sends[r]; ++i) in.Set(at++, Value(dtype, rank.rank(), i + r));
        }
        out.Fill(99);
        RANK_CHECK_OK(rank.group().AllToAll(cut(in, sends), sends, cut(out, receives), receives).Wait());
        for (size_t r = 0, at = 0; r < n; ++r) {
          for (size_t i = 0; i < receives[r]; ++i)
            RANK_CHECK_EQ(out.Get(at++), Value(dtype, static_cast<int>(r), i + me));
        }
      }
    }
  });
}

TEST_CASE("reduce-scatter with counts gives each rank its part, also in place") {
  RunOnRanks([](Rank& rank) {
    const size_t n = static_cast<size_t>(rank.size()), me = static_cast<size_t>(rank.rank());
    std::vector<size_t> counts, begins = {0};
    for (size_t r = 0; r < n; ++r) counts.push_back(r == 1 ? 0 : 700 * r + 3), begins.push_back(begins[r] + counts[r]);
    for (const DType dtype : kAllDTypes) {
      for (const Placement placement : kAllPlacements) {
        for (const bool in_place : {false, true}) {
          Memory in(rank, placement, dtype, begins[n]), other(rank, placement, dtype, 3000);
          for (size_t i = 0; i < begins[n]; ++i) in.Set(i, Value(dtype, rank.rank(), i));
          const Buffer out = in_place ? in.Range(begins[me], counts[me]) : other.Range(0, counts[me]);
          RANK_CHECK_OK(rank.group().ReduceScatter(in.whole(), out, counts).Wait());
          for (size_t i = 0; i < counts[me]; ++i) {
            double sum = 0;
            for (int r = 0; r < rank.size(); ++r) sum += Value(dtype, r, begins[me] + i);
            RANK_CHECK_EQ(GetElement(dtype, out.data, i), sum);
          }
        }
      }
    }
  });
}

TEST_CASE("messages go round a ring, both ways, without an order among the ranks") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const int n = rank.size(), next = (rank.rank() + 1) % n, before = (rank.rank() + n - 1) % n;
    for (const size_t count : {size_t{0}, size_t{7}, size_t{300'000}}) {
      Memory in(rank, Placement::kOrdinary, DType::kFloat32, count),
          out(rank, Placement::kAllocated, DType::kFloat32, count);
      Memory back(rank, Placement::kOrdinary, DType::kFloat32, count);
      in.Fill(rank.rank());
      Work there = rank.group().SendRecv(in.whole(), next, out.whole(), before, 5);
      Work again = rank.group().SendRecv(in.whole(), before, back.whole(), next, 6);
      RANK_CHECK_OK(there.Wait());
      RANK_CHECK_OK(again.Wait());
      for (const size_t i : {size_t{0}, count / 2}) {
        if (count > 0) RANK_CHECK_EQ(out.Get(i), before);
        if (count > 0) RANK_CHECK_EQ(back.Get(i), next);
      }
    }
  });
}

TEST_CASE("bytes and strings of any length") {
  RunOnRanks([](Rank& rank) {
    for (const size_t length : {size_t{0}, size_t{1}, size_t{5000}, size_t{3'000'000}}) {
      const auto text = [&](int r) {
        return std::string(length * static_cast<size_t>(r) / 2, static_cast<char>('a' + r));
      };
      const int root = rank.size() - 1;
      RANK_CHECK_EQ(RANK_VALUE(BroadcastBytes(rank.group(), text(rank.rank()), root)), text(root));
      const std::vector<std::string> all = RANK_VALUE(GatherStrings(rank.group(), text(rank.rank())));
      RANK_CHECK_EQ(all.size(), static_cast<size_t>(rank.size()));
      for (int r = 0; r < rank.size(); ++r) RANK_CHECK(all[static_cast<size_t>(r)] == text(r), "of rank ", r);
    }
    RANK_CHECK_EQ(RANK_VALUE(BroadcastBytes(rank.group(), std::string("a\0b", 3), 0)), std::string("a\0b", 3));
  });
}

TEST_CASE("scalars") {
  RunOnRanks([](Rank& rank) {
    const double n = rank.size(), sum = n * (n - 1) / 2;
    RANK_CHECK_EQ(RANK_VALUE(SumScalar(rank.group(), rank.rank() + 0.5)), sum + n / 2);
    RANK_CHECK_EQ(RANK_VALUE(AverageScalar(rank.group(), 4.0 * rank.rank())), 4 * sum / n);
    RANK_CHECK_EQ(RANK_VALUE(AllReduceScalar(rank.group(), 1.0 * rank.rank(), ReduceOp::kMax)), n - 1);
    const int64_t large = int64_t{1} << 60;
    RANK_CHECK_EQ(RANK_VALUE(AllReduceScalar(rank.group(), large - rank.rank(), ReduceOp::kMin)),
                  large - rank.size() + 1);
  });
}

TEST_CASE("mistakes name the call") {
  RunOnRanks([](Rank& rank) {
    ProcessGroup& group = rank.group();
    Memory m(rank, Placement::kOrdinary, DType::kFloat32, 100);
    const std::string me = absl::StrCat("rank ", rank.rank());
    const Buffer ten = m.Range(0, 10);
    RANK_CHECK_STATUS(group.Reduce(ten, ten, -1), StatusCode::kInvalidArgument, me, "reduce", "root");
    RANK_CHECK_STATUS(group.Gather(ten, ten, rank.size()), StatusCode::kInvalidArgument, me, "gather", "root");
    RANK_CHECK_STATUS(group.Scatter(ten, ten, -1), StatusCode::kInvalidArgument, me, "scatter", "root");
    RANK_CHECK_STATUS(group.Gather({}, ten, 0), StatusCode::kInvalidArgument, me, "gather", "no in buffers");
    RANK_CHECK_STATUS(group.Scatter(ten, {}, 0), StatusCode::kInvalidArgument, me, "scatter", "no out buffers");
    RANK_CHECK_STATUS(group.Gather(ten, m.whole(), rank.rank()), StatusCode::kInvalidArgument, me, "gather", "out 100");
    const size_t n = static_cast<size_t>(rank.size());
    std::vector<size_t> fives(n, 5), more(n + 1, 5);
    Memory fine(rank, Placement::kOrdinary, DType::kFloat32, 5 * n);
    RANK_CHECK_STATUS(group.AllToAll(fine.whole(), more, m.Range(0, 5 * n), fives), StatusCode::kInvalidArgument,
                      "all_to_all_v", absl::StrCat(n + 1, " counts"));
    RANK_CHECK_STATUS(group.AllToAll(fine.whole(), fives, m.Range(0, 5 * n + 1), fives), StatusCode::kInvalidArgument,
                      "all_to_all_v", "out has", "counts come to");
    RANK_CHECK_STATUS(group.AllToAll(fine.whole(), fives, fine.whole(), fives), StatusCode::kInvalidArgument,
                      "overlap");
    fives[static_cast<size_t>(rank.rank())] = 4;
    RANK_CHECK_STATUS(group.ReduceScatter(fine.whole(), ten, fives), StatusCode::kInvalidArgument, "reduce_scatter_v",
                      "in has");
    RANK_CHECK_STATUS(group.SendRecv(ten, rank.rank(), fine.whole(), rank.rank(), 0), StatusCode::kInvalidArgument,
                      "send_recv", "this rank itself");
    RANK_CHECK_OK(group.status());
  });
}

TEST_CASE("ranks that give unequal parts to a Gather all learn of it") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    Memory m(rank, Placement::kOrdinary, DType::kFloat32, 10 * static_cast<size_t>(rank.size()));
    const Buffer mine = m.Range(0, rank.rank() == 1 ? 9 : 10);
    absl::Status status = rank.group().Gather(mine, rank.rank() == 0 ? Buffers(m.whole()) : Buffers(), 0).Wait();
    if (status.ok()) status = rank.group().Barrier().Wait();
    RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "rank 1 sends to rank 0", "9 elements", "10 elements");
  });
}

}  // namespace
}  // namespace ddp::testing
