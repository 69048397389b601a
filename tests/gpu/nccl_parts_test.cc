// SPDX-License-Identifier: Apache-2.0
// On real GPUs: one rank that gets or gives the whole, parts of uneven sizes, and messages round a ring.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/gpu/on_gpus.h"
#include "tests/support/catch.h"

namespace ddp::testing {
namespace {

double Value(size_t from, size_t i) { return static_cast<double>(3'000'000 * from + i); }

size_t Total(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

// Reduce, Gather and Scatter, the last two also in place.
void CheckRoot(Rank& rank, int root, size_t count, size_t pieces, bool allocated) {
  const size_t n = static_cast<size_t>(rank.size()), me = static_cast<size_t>(rank.rank());
  const bool here = rank.rank() == root;
  const DType type = DType::kInt64;
  Array part(rank, type, count, allocated), whole(rank, type, count * n, allocated), sum(rank, type, count, false);
  const auto expect_whole = [&] {
    if (here) whole.Expect([&](size_t i) { return Value(i / count, i % count); });
  };
  part.Fill([&](size_t i) { return Value(me, i); });
  whole.Fill([](size_t) { return -1; });
  const std::vector<Buffer> wholes = here ? whole.Cut(pieces + 1) : std::vector<Buffer>();
  const std::vector<Buffer> sums = here ? sum.Cut(pieces + 1) : std::vector<Buffer>();
  Work gathered = rank.group().Gather(part.Cut(pieces), wholes, root, kNoStream);
  Work summed = rank.group().Reduce(part.Cut(pieces), sums, root, {}, kNoStream);
  RANK_CHECK_OK(gathered.Wait());
  RANK_CHECK_OK(summed.Wait());
  expect_whole();
  const double ranks = static_cast<double>(n * (n - 1)) / 2;
  if (here) sum.Expect([&](size_t i) { return 3'000'000 * ranks + static_cast<double>(n * i); });
  part.Fill([](size_t) { return -1; });
  RANK_CHECK_OK(rank.group().Scatter(wholes, part.Cut(pieces), root, kNoStream).Wait());
  part.Expect([&](size_t i) { return Value(me, i); });
  const Buffer all = whole.Cut(1)[0];
  const Buffer own{static_cast<int64_t*>(all.data) + me * count, count, type, all.device};
  const Buffer mine = here ? own : part.Cut(1)[0];
  RANK_CHECK_OK(rank.group().Gather(mine, all, root, kNoStream).Wait());
  RANK_CHECK_OK(rank.group().Scatter(all, mine, root, kNoStream).Wait());
  expect_whole();
}

TEST_CASE("one rank gets or gives the whole, whichever it is") {
  RunOnGpus([](Rank& rank) {
    for (const size_t count : {size_t{10}, size_t{1'000'003}}) {
      for (const bool allocated : {false, true}) {
        for (const size_t pieces : {size_t{1}, size_t{3}}) {
          for (int root = 0; root < rank.size(); ++root) CheckRoot(rank, root, count, pieces, allocated);
        }
      }
    }
  });
}

TEST_CASE("a reduction to one rank scales, converts, and tells what is not finite") {
  RunOnGpus([](Rank& rank) {
    const int root = rank.size() - 1;
    for (const DType in : {DType::kFloat32, DType::kBFloat16}) {
      for (const DType out : {DType::kFloat32, DType::kFloat16}) {
        Array a(rank, in, 5000, true), b(rank, out, 5000, false), word(rank, DType::kInt32, 1, false);
        ReduceOptions options{.op = ReduceOp::kAvg, .prescale = 2, .postscale = 4};
        options.nonfinite = reinterpret_cast<uint32_t*>(word.data());
        for (const bool bad : {false, true}) {
          a.Fill([&](size_t i) {
            return bad && rank.rank() == 0 && i == 4999 ? HUGE_VAL : static_cast<double>(i % 50) + 2 * rank.rank();
          });
          word.Fill([](size_t) { return 0; });
          RANK_CHECK_OK(rank.group().Reduce(a.Cut(2), b.Cut(1), root, options, kNoStream).Wait());
          if (rank.rank() != root) continue;
          word.Expect([&](size_t) { return bad ? 1 : 0; });
          if (!bad) b.Expect([&](size_t i) { return 8 * (static_cast<double>(i % 50) + root); }, 1e-2);
        }
      }
    }
  });
}

// Of how many elements rank `from` gives rank `to`, times `unit`. A rank alone gives itself some; with more ranks some
// parts are empty.
size_t Given(size_t from, size_t to) { return (2 * from + 3 * to + 5) % 4; }

// Which part element `i` of parts of these sizes is in, and where in it.
std::pair<size_t, size_t> PartOf(const std::vector<size_t>& counts, size_t i) {
  size_t part = 0;
  for (; i >= counts[part]; ++part) i -= counts[part];
  return {part, i};
}

void CheckUneven(Rank& rank, size_t unit, bool allocated, size_t pieces) {
  const size_t n = static_cast<size_t>(rank.size()), me = static_cast<size_t>(rank.rank());
  std::vector<size_t> sends, receives, counts;
  for (size_t r = 0; r < n; ++r) {
    sends.push_back(Given(me, r) * unit);
    receives.push_back(Given(r, me) * unit);
    counts.push_back((r + 1) % 3 * unit);
  }
  // Allocations are as large on all ranks; the operations use the beginnings.
  const auto make = [&] { return Array(rank, DType::kInt64, 3 * n * unit, allocated); };
  const auto begin = [&](const Array& array, size_t count) {
    return Cut({array.data(), count, DType::kInt64, rank.context().device()}, pieces);
  };
  constexpr double kUntouched = -1;
  Array in = make(), out = make(), all = make(), mine = make();
  in.Fill([&](size_t i) {
    if (i >= Total(sends)) return kUntouched;
    const auto [to, at] = PartOf(sends, i);
    return Value(10 * me + to, at);
  });
  out.Fill([](size_t) { return kUntouched; });
  RANK_CHECK_OK(
      rank.group().AllToAll(begin(in, Total(sends)), sends, begin(out, Total(receives)), receives, kNoStream).Wait());
  out.Expect([&](size_t i) {
    if (i >= Total(receives)) return kUntouched;
    const auto [from, at] = PartOf(receives, i);
    return Value(10 * from + me, at);
  });
  all.Fill([&](size_t i) { return Value(me, i); });
  mine.Fill([](size_t) { return kUntouched; });
  RANK_CHECK_OK(
      rank.group().ReduceScatter(begin(all, Total(counts)), begin(mine, counts[me]), counts, {}, kNoStream).Wait());
  const size_t before = Total({counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(me)});
  mine.Expect([&](size_t i) {
    if (i >= counts[me]) return kUntouched;
    double sum = 0;
    for (size_t r = 0; r < n; ++r) sum += Value(r, before + i);
    return sum;
  });
}

TEST_CASE("parts of uneven sizes go where they belong") {
  RunOnGpus([](Rank& rank) {
    for (const size_t unit : {size_t{1}, size_t{100'003}}) {
      for (const bool allocated : {false, true}) {
        for (const size_t pieces : {size_t{1}, size_t{2}}) CheckUneven(rank, unit, allocated, pieces);
      }
    }
  });
}

// As single calls these would wait for each other for ever: every rank sends first.
TEST_CASE("a ring of messages needs no order among the ranks") {
  if (RankCount() < 2) return;
  RunOnGpus([](Rank& rank) {
    const int n = rank.size(), next = (rank.rank() + 1) % n, before = (rank.rank() + n - 1) % n;
    for (const size_t count : {size_t{1000}, size_t{1} << 21}) {
      for (const int kinds : {0, 1, 2, 3}) {
        Array in(rank, DType::kInt64, count, (kinds & 1) != 0), out(rank, DType::kInt64, count, (kinds & 2) != 0);
        in.Fill([&](size_t i) { return Value(static_cast<size_t>(rank.rank()), i); });
        RANK_CHECK_OK(rank.group().SendRecv(in.Cut(2), next, out.Cut(3), before, 1, kNoStream).Wait());
        out.Expect([&](size_t i) { return Value(static_cast<size_t>(before), i); });
        RANK_CHECK_OK(rank.group().SendRecv(in.Cut(1), before, out.Cut(1), next, 1, kNoStream).Wait());
        out.Expect([&](size_t i) { return Value(static_cast<size_t>(next), i); });
      }
    }
  });
}

}  // namespace
}  // namespace ddp::testing
