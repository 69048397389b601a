// SPDX-License-Identifier: Apache-2.0
// The contract of ProcessGroup, part 1: what AllReduce and ReduceScatter compute.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

struct Case {
  DType in = DType::kFloat32;
  DType out = DType::kFloat32;
  ReduceOptions options;
  size_t count = 1000;
  Placement placement = Placement::kAllocated;
  bool in_place = true;
  int pieces = 1;

  std::string Text(size_t i) const {
    return absl::StrCat(Name(in), "->", Name(out), " ", Name(options.op), " count ", count, " placement ",
                        static_cast<int>(placement), in_place ? " in place" : "", " pieces ", pieces, " at ", i);
  }
};

// What every rank contributes at i.
using Values = double (*)(const Case&, int rank, size_t i);
double WholeNumbers(const Case& c, int rank, size_t i) { return WholeNumber(c.in, c.options.op, rank, i); }
double AwkwardNumbers(const Case&, int rank, size_t i) { return Awkward(rank, i); }

double Expected(const Case& c, int size, size_t i, Values values) {
  std::array<double, 16> all;
  for (int r = 0; r < size; ++r) all[static_cast<size_t>(r)] = values(c, r, i);
  const absl::Span<const double> by_rank(all.data(), static_cast<size_t>(size));
  double rounded = 0;
  SetElement(c.out, &rounded, 0, Reduce(c.in, c.options.op, by_rank, c.options.prescale, c.options.postscale));
  return GetElement(c.out, &rounded, 0);
}

// One AllReduce and a look at every element.
void CheckAllReduce(Rank& rank, const Case& c, Values values = WholeNumbers) {
  Memory in(rank, c.placement, c.in, c.count);
  Memory other(rank, c.placement, c.out, c.in_place ? 0 : c.count);
  const Memory& out = c.in_place ? in : other;
  for (size_t i = 0; i < c.count; ++i) in.Set(i, values(c, rank.rank(), i));
  // Ranks cut in and out into different ranges, and in place both in the same way.
  const unsigned seed = static_cast<unsigned>(rank.rank() + 10);
  const std::vector<Buffer> ins = in.Cut(c.pieces, seed);
  const std::vector<Buffer> outs = c.in_place ? ins : out.Cut(c.pieces, seed + 1);
  RANK_CHECK_OK(rank.group().AllReduce(ins, outs, c.options).Wait());
  for (size_t i = 0; i < c.count; ++i) {
    const double expected = Expected(c, rank.size(), i, values);
    RANK_CHECK(out.Get(i) == expected, c.Text(i), ": ", out.Get(i), " not ", expected);
    if (!c.in_place) RANK_CHECK(in.Get(i) == values(c, rank.rank(), i), c.Text(i), ": the input has changed");
  }
}

// ReduceScatter of `c.count` elements per rank.
void CheckReduceScatter(Rank& rank, const Case& c) {
  const size_t all = c.count * static_cast<size_t>(rank.size());
  const size_t mine = c.count * static_cast<size_t>(rank.rank());
  Memory in(rank, c.placement, c.in, all);
  Memory other(rank, c.placement, c.out, c.in_place ? 0 : c.count);
  for (size_t i = 0; i < all; ++i) in.Set(i, WholeNumbers(c, rank.rank(), i));
  const unsigned seed = static_cast<unsigned>(rank.rank() + 20);
  const std::vector<Buffer> outs = c.in_place ? in.Cut(mine, c.count, c.pieces, seed) : other.Cut(c.pieces, seed);
  // In place, the input is cut where the output is.
  std::vector<Buffer> ins;
  if (c.in_place) {
    ins.push_back(in.Range(0, mine));
    ins.insert(ins.end(), outs.begin(), outs.end());
    ins.push_back(in.Range(mine + c.count, all - mine - c.count));
  } else {
    ins = in.Cut(c.pieces + 1, seed + 1);
  }
  RANK_CHECK_OK(rank.group().ReduceScatter(ins, outs, c.options).Wait());
  for (size_t i = 0; i < c.count; ++i) {
    const double got = c.in_place ? in.Get(mine + i) : other.Get(i);
    RANK_CHECK(got == Expected(c, rank.size(), mine + i, WholeNumbers), c.Text(i), ": ", got, " not ",
               Expected(c, rank.size(), mine + i, WholeNumbers));
  }
}

ReduceOptions With(ReduceOp op, double prescale = 1, double postscale = 1) {
  ReduceOptions options;
  options.op = op;
  options.prescale = prescale;
  options.postscale = postscale;
  return options;
}

TEST_CASE("every op in every dtype") {
  RunOnRanks([](Rank& rank) {
    for (const DType dtype : kCallDTypes) {
      for (const ReduceOp op : kAllOps) {
        CheckAllReduce(rank, {.in = dtype, .out = dtype, .options = With(op), .count = 1003});
        CheckAllReduce(rank, {.in = dtype,
                              .out = dtype,
                              .options = With(op),
                              .count = 517,
                              .placement = Placement::kMixed,
                              .in_place = false,
                              .pieces = 3});
        CheckReduceScatter(rank, {.in = dtype, .out = dtype, .options = With(op), .count = 261});
      }
    }
  });
}

TEST_CASE("every count, placement and split, in place and out of place") {
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      for (const size_t count : {size_t{0}, size_t{1}, size_t{2}, size_t{7}, size_t{63}, size_t{1000}, size_t{4097}}) {
        for (const bool in_place : {true, false}) {
          for (const int pieces : {1, 5}) {
            for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8}) {
              const Case c = {.in = dtype,
                              .out = dtype,
                              .options = With(ReduceOp::kSum),
                              .count = count,
                              .placement = placement,
                              .in_place = in_place,
                              .pieces = pieces};
              CheckAllReduce(rank, c);
              CheckReduceScatter(rank, c);
            }
          }
        }
      }
    }
  });
}

TEST_CASE("counts of many chunks") {
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      for (const size_t count : {size_t{100'003}, size_t{524'287}}) {
        const Case c = {.options = With(ReduceOp::kAvg), .count = count, .placement = placement, .pieces = 4};
        CheckAllReduce(rank, c);
        CheckReduceScatter(rank, {.options = With(ReduceOp::kAvg),
                                  .count = count / 8,
                                  .placement = placement,
                                  .in_place = false,
                                  .pieces = 4});
      }
    }
    CheckAllReduce(rank, {.options = With(ReduceOp::kSum), .count = 300'001, .in_place = false, .pieces = 200});
    // Few enough for two nodes to send the first ones with what they compare: shares of two chunks and of three.
    for (const size_t count : {size_t{15'361}, size_t{16'384}, size_t{40'001}}) {
      CheckAllReduce(rank, {.options = With(ReduceOp::kAvg), .count = count});
      CheckAllReduce(
          rank,
          {.out = DType::kBFloat16, .options = With(ReduceOp::kSum), .count = count, .in_place = false, .pieces = 3});
    }
  });
}

// More than 2 MiB, in one range on each rank: processes read it where it lies.
TEST_CASE("large private arrays") {
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : {Placement::kOrdinary, Placement::kUnaligned}) {
      for (const bool in_place : {true, false}) {
        Case c = {.in = DType::kFloat64, .out = DType::kFloat64, .options = With(ReduceOp::kSum)};
        c.placement = placement;
        c.in_place = in_place;
        c.count = 270'001;
        CheckAllReduce(rank, c);
        c.count = 140'001;
        CheckReduceScatter(rank, c);
      }
    }
    CheckAllReduce(rank, {.out = DType::kBFloat16,
                          .options = With(ReduceOp::kAvg),
                          .count = 550'001,
                          .placement = Placement::kOrdinary,
                          .in_place = false});
  });
}

TEST_CASE("an operation on nothing, without an address") {
  RunOnRanks([](Rank& rank) {
    ProcessGroup& group = rank.group();
    const Buffer nothing = {nullptr, 0, DType::kFloat32, {}};
    RANK_CHECK_OK(group.AllReduce(nothing, nothing).Wait());
    RANK_CHECK_OK(group.Broadcast(nothing, 0).Wait());
    RANK_CHECK_OK(group.AllGather(nothing, nothing).Wait());
    RANK_CHECK_OK(group.ReduceScatter(nothing, nothing).Wait());
  });
}

TEST_CASE("float32 and the 16-bit types convert to each other") {
  RunOnRanks([](Rank& rank) {
    const DType floats[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    for (const DType in : floats) {
      for (const DType out : floats) {
        if (in == out) continue;
        for (const Placement placement : {Placement::kAllocated, Placement::kUnaligned}) {
          const Case c = {.in = in,
                          .out = out,
                          .options = With(ReduceOp::kSum, 1, 0.125),
                          .count = 3001,
                          .placement = placement,
                          .in_place = false,
                          .pieces = 2};
          CheckAllReduce(rank, c);
          CheckReduceScatter(rank, c);
        }
      }
    }
  });
}

TEST_CASE("scaling before and after") {
  RunOnRanks([](Rank& rank) {
    for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const ReduceOp op : kAllOps) {
        CheckAllReduce(rank, {.in = dtype, .out = dtype, .options = With(op, 0.5, 4), .count = 501});
        CheckReduceScatter(rank,
                           {.in = dtype, .out = dtype, .options = With(op, 2, 0.25), .count = 77, .in_place = false});
      }
    }
    // Neither factor is a power of two: rounding has to be where the contract puts it.
    CheckAllReduce(rank, {.options = With(ReduceOp::kSum, 1.0 / 3, 0.7), .count = 20'011}, AwkwardNumbers);
  });
}

TEST_CASE("the average of integers is truncated toward zero") {
  RunOnRanks([](Rank& rank) {
    for (const DType dtype : {DType::kInt64, DType::kInt32, DType::kInt8}) {
      Memory m(rank, Placement::kAllocated, dtype, 2);
      m.Set(0, rank.rank() == 0 ? -7 : 0);
      m.Set(1, rank.rank() == 0 ? 7 : 0);
      RANK_CHECK_OK(rank.group().AllReduce(m.whole(), m.whole(), With(ReduceOp::kAvg)).Wait());
      RANK_CHECK_EQ(m.Get(0), -std::floor(7.0 / rank.size()));
      RANK_CHECK_EQ(m.Get(1), std::floor(7.0 / rank.size()));
    }
  });
}

TEST_CASE("sums are made in rank order and do not depend on how a tensor is cut, where it lies, or the run") {
  constexpr size_t kCount = 60'013;
  RunOnRanks([](Rank& rank) {
    // Order-dependence of these values, or the rest of this test would say nothing.
    int order_matters = 0;
    for (size_t i = 0; i < 1000; ++i) {
      const double up[] = {Awkward(0, i), Awkward(1, i), Awkward(2, i)};
      const double down[] = {up[2], up[1], up[0]};
      order_matters += Reduce(DType::kFloat32, ReduceOp::kSum, up) != Reduce(DType::kFloat32, ReduceOp::kSum, down);
    }
    RANK_CHECK(order_matters > 100);

    for (const Placement placement : kAllPlacements) {
      for (const bool in_place : {true, false}) {
        CheckAllReduce(rank,
                       {.options = With(ReduceOp::kAvg), .count = kCount, .placement = placement, .in_place = in_place},
                       AwkwardNumbers);
      }
    }
    // The same tensor as many operations of random sizes, all in flight at once.
    for (unsigned run = 0; run < 3; ++run) {
      const Case c = {.options = With(ReduceOp::kAvg), .count = kCount};
      Memory m(rank, Placement::kMixed, DType::kFloat32, kCount);
      for (size_t i = 0; i < kCount; ++i) m.Set(i, Awkward(rank.rank(), i));
      std::vector<Work> works;
      for (const Buffer& piece : m.Cut(40, run)) {
        works.push_back(rank.group().AllReduce(piece, piece, c.options));
      }
      for (Work& work : works) RANK_CHECK_OK(work.Wait());
      for (size_t i = 0; i < kCount; ++i) {
        RANK_CHECK_EQ(m.Get(i), Expected(c, rank.size(), i, AwkwardNumbers));
      }
    }
  });
}

TEST_CASE("infinities and NaNs raise the flag on all ranks") {
  RunOnRanks([](Rank& rank) {
    const double infinity = std::numeric_limits<double>::infinity();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const double bad : {0.0, infinity, -infinity, nan}) {
        for (const size_t where : {size_t{0}, size_t{4999}, size_t{9999}}) {
          Memory m(rank, Placement::kAllocated, dtype, 10'000);
          m.Fill(1);
          if (rank.rank() == rank.size() - 1) m.Set(where, bad);
          uint32_t flag = 7;
          ReduceOptions options = With(ReduceOp::kAvg);
          options.nonfinite = &flag;
          RANK_CHECK_OK(rank.group().AllReduce(m.whole(), m.whole(), options).Wait());
          RANK_CHECK_EQ(flag, bad == 0 ? 7u : 1u);
        }
      }
    }
    // A sum that a 16-bit float could not hold, but the accumulator does, is finite when scaling brings it back.
    Memory m(rank, Placement::kAllocated, DType::kFloat16, 100);
    m.Fill(60'000);
    uint32_t flag = 0;
    ReduceOptions options = With(ReduceOp::kAvg);
    options.nonfinite = &flag;
    RANK_CHECK_OK(rank.group().AllReduce(m.whole(), m.whole(), options).Wait());
    RANK_CHECK_EQ(flag, 0u);
    RANK_CHECK_EQ(m.Get(50), 60'000.0);
  });
}

// In float32 the sums are finite.
TEST_CASE("a sum that overflows as it is stored raises the flag on all ranks") {
  RunOnRanks([](Rank& rank) {
    const auto sum = [&](DType in, DType out, double mine, bool overflows) {
      for (const size_t where : {size_t{0}, size_t{5000}, size_t{9999}}) {
        Memory from(rank, Placement::kAllocated, in, 10'000), to(rank, Placement::kAllocated, out, 10'000);
        from.Fill(1);
        from.Set(where, mine);
        uint32_t flag = 7;
        ReduceOptions options;
        options.nonfinite = &flag;
        const Buffer result = in == out ? from.whole() : to.whole();
        RANK_CHECK_OK(rank.group().AllReduce(from.whole(), result, options).Wait());
        RANK_CHECK_EQ(std::isinf(GetElement(out, result.data, where)), overflows);
        RANK_CHECK_EQ(flag, overflows ? 1u : 7u);
      }
    };
    const bool several = rank.size() > 1;
    sum(DType::kFloat16, DType::kFloat16, 40'000, several);
    sum(DType::kFloat16, DType::kFloat16, -40'000, several);
    sum(DType::kFloat16, DType::kFloat32, 40'000, false);
    sum(DType::kFloat32, DType::kFloat16, 65'519.0 / rank.size(), false);
    sum(DType::kFloat32, DType::kFloat16, 65'536.0 / rank.size(), true);
    sum(DType::kFloat32, DType::kBFloat16, rank.rank() == 0 ? 0x1.ffp127 : 0, true);
    sum(DType::kBFloat16, DType::kBFloat16, rank.rank() == 0 ? 0x1.fep127 : rank.rank() == 1 ? 0x1p119 : 0, several);
  });
}

TEST_CASE("a reduction whose result a rank does not get says nothing of it there") {
  RunOnRanks([](Rank& rank) {
    const int last = rank.size() - 1;
    const std::vector<size_t> counts(static_cast<size_t>(rank.size()), 3);
    const size_t all = 3 * counts.size();
    Memory in(rank, Placement::kAllocated, DType::kFloat32, all), out(rank, Placement::kAllocated, DType::kFloat32, 3);
    in.Fill(1);
    in.Set(all - 1, std::numeric_limits<double>::infinity());
    uint32_t of_scatter = 7, of_reduce = 7;
    ReduceOptions options;
    options.nonfinite = &of_scatter;
    RANK_CHECK_OK(rank.group().ReduceScatter(in.whole(), out.whole(), counts, options).Wait());
    options.nonfinite = &of_reduce;
    RANK_CHECK_OK(rank.group().Reduce(in.whole(), in.whole(), last, options).Wait());
    RANK_CHECK_EQ(of_scatter, rank.rank() == last ? 1u : 7u);
    RANK_CHECK_EQ(of_reduce, rank.rank() == last ? 1u : 7u);
  });
}

TEST_CASE("minimum and maximum hand on a NaN") {
  RunOnRanks([](Rank& rank) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (int from = 0; from < rank.size(); ++from) {
        Memory m(rank, Placement::kAllocated, DType::kFloat32, 100);
        m.Fill(rank.rank());
        if (rank.rank() == from) m.Set(37, std::numeric_limits<double>::quiet_NaN());
        RANK_CHECK_OK(rank.group().AllReduce(m.whole(), m.whole(), With(op)).Wait());
        RANK_CHECK(std::isnan(m.Get(37)));
        RANK_CHECK_EQ(m.Get(36), op == ReduceOp::kMin ? 0.0 : rank.size() - 1.0);
      }
    }
  });
}

// Repeats `pattern` over `count` bytes. Its length is odd, so that no two places that lie a power of two apart look
// alike.
void Tile(const std::vector<uint8_t>& pattern, uint8_t* data, size_t count) {
  for (size_t i = 0; i < count; i += pattern.size())
    std::memcpy(data + i, pattern.data(), std::min(pattern.size(), count - i));
}
bool IsTiled(const std::vector<uint8_t>& pattern, const uint8_t* data, size_t count) {
  for (size_t i = 0; i < count; i += pattern.size()) {
    if (std::memcmp(data + i, pattern.data(), std::min(pattern.size(), count - i)) != 0) return false;
  }
  return true;
}

TEST_CASE("more than 2^31 bytes", "[.][large]") {
  RunOnRanks([](Rank& rank) {
    constexpr size_t kCount = (size_t{1} << 31) + 4099;
    const auto pattern = [](int r) {
      std::vector<uint8_t> bytes((size_t{1} << 20) + 7);
      for (size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<uint8_t>(i * 31 + i / 251 + static_cast<size_t>(r) * 57);
      return bytes;
    };
    std::vector<uint8_t> sum((size_t{1} << 20) + 7);
    for (int r = 0; r < rank.size(); ++r) {
      const std::vector<uint8_t> theirs = pattern(r);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = static_cast<uint8_t>(sum[i] + theirs[i]);
    }
    {
      const Allocation memory = RANK_VALUE(rank.group().Allocate(kCount, Device{}));
      uint8_t* const data = static_cast<uint8_t*>(memory.data());
      Tile(pattern(rank.rank()), data, kCount);
      const Buffer whole = memory.View(DType::kUInt8, 0, kCount);
      RANK_CHECK_OK(rank.group().AllReduce(whole, whole).Wait());
      RANK_CHECK(IsTiled(sum, data, kCount));
    }
    std::vector<uint8_t> ordinary(kCount);
    if (rank.rank() == 1) Tile(sum, ordinary.data(), kCount);
    const Buffer buffer = {ordinary.data(), kCount, DType::kUInt8, {}};
    RANK_CHECK_OK(rank.group().Broadcast(buffer, 1).Wait());
    RANK_CHECK(IsTiled(sum, ordinary.data(), kCount));
    if (rank.rank() == 0) {
      Tile(pattern(0), ordinary.data(), kCount);
      RANK_CHECK_OK(rank.group().Send(buffer, 1, 0).Wait());
    } else if (rank.rank() == 1) {
      RANK_CHECK_OK(rank.group().Recv(buffer, 0, 0).Wait());
      RANK_CHECK(IsTiled(pattern(0), ordinary.data(), kCount));
    }
    // Rank r's part of the sum of what all have.
    Tile(sum, ordinary.data(), kCount);
    const size_t part = kCount / static_cast<size_t>(rank.size());
    const Buffer in = {ordinary.data(), part * static_cast<size_t>(rank.size()), DType::kUInt8, {}};
    const Buffer out = {ordinary.data() + part * static_cast<size_t>(rank.rank()), part, DType::kUInt8, {}};
    RANK_CHECK_OK(rank.group().ReduceScatter(in, out).Wait());
    std::vector<uint8_t> expected(kCount);
    Tile(sum, expected.data(), kCount);
    for (size_t i = 0; i < part; ++i) {
      const size_t at = part * static_cast<size_t>(rank.rank()) + i;
      RANK_CHECK_EQ(ordinary[at], static_cast<uint8_t>(expected[at] * rank.size()));
    }
  });
}

}  // namespace
}  // namespace ddp::testing
