// SPDX-License-Identifier: Apache-2.0
// The kernels of the staged protocol, compiled for the CPU, and operations on them: several GPUs over one ring.
#ifndef TESTS_SUPPORT_STAGED_KERNELS_H_
#define TESTS_SUPPORT_STAGED_KERNELS_H_

#include "tests/support/cuda_on_cpu.h"  // before the kernels

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "libddp/comm/ring/staged_plan.h"
#include "libddp/device/cpu_reduce.h"
#include "libddp/device/cuda_staged_transfer.h"
#include "tests/support/catch.h"
#include "tests/support/numbers.h"

namespace ddp::testing {
namespace {  // each file's own, as the kernels are

using staged::Move;
using Bytes = std::vector<char>;

// --- launches -------------------------------------------------------------------------------------------------------

template <typename In, typename Out>
void Run(const staged::Collective& c, int index) {
  cuda::ReducingBlock<In, Out> block(c);
  staged::RunCollective(block, c, index);
  block.Report();
}
template <typename In>
void RunTo(const staged::Collective& c, int index) {
  switch (static_cast<DType>(c.arithmetic.out_type)) {
    case DType::kFloat16:
      return Run<In, __half>(c, index);
    case DType::kBFloat16:
      return Run<In, __nv_bfloat16>(c, index);
    default:
      return Run<In, float>(c, index);
  }
}
void RunAny(const staged::Collective& c, int index) {
  switch (static_cast<DType>(c.arithmetic.in_type)) {
    case DType::kFloat64:
      return Run<double, double>(c, index);
    case DType::kFloat32:
      return RunTo<float>(c, index);
    case DType::kFloat16:
      return RunTo<__half>(c, index);
    case DType::kBFloat16:
      return RunTo<__nv_bfloat16>(c, index);
    case DType::kInt64:
      return Run<int64_t, int64_t>(c, index);
    case DType::kInt32:
      return Run<int32_t, int32_t>(c, index);
    case DType::kInt8:
      return Run<int8_t, int8_t>(c, index);
    case DType::kUInt8:
      return Run<uint8_t, uint8_t>(c, index);
  }
}

// --- memory ---------------------------------------------------------------------------------------------------------

// An array in ranges, each in memory of its own that begins `shift` elements after a multiple of 16 bytes.
class Ranges {
 public:
  Ranges(uint64_t count, DType type, uint64_t ranges, uint64_t shift) {
    const uint64_t size = SizeOf(type);
    for (uint64_t r = 0; r < ranges; ++r) {
      const uint64_t n = count * (r + 1) / ranges - count * r / ranges;
      if (n == 0) continue;
      memory_.push_back(std::make_unique<char[]>(n * size + 16 + shift * size));
      const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory_.back().get()) + 15) / 16 * 16;
      table.data[table.ranges] = reinterpret_cast<char*>(begin + shift * size);
      table.end[table.ranges++] = count * (r + 1) / ranges * size;
    }
  }
  void Set(const Bytes& bytes) const {
    ForEach([&](char* range, uint64_t at, uint64_t n) { std::memcpy(range, bytes.data() + at, n); });
  }
  Bytes Get() const {
    Bytes bytes(table.ranges == 0 ? 0 : table.end[table.ranges - 1]);
    ForEach([&](char* range, uint64_t at, uint64_t n) { std::memcpy(bytes.data() + at, range, n); });
    return bytes;
  }

  staged::RangeTable table = {};

 private:
  template <typename Fn>
  void ForEach(Fn fn) const {
    for (int r = 0; r < table.ranges; ++r) {
      const uint64_t begin = r == 0 ? 0 : table.end[r - 1];
      fn(table.data[r], begin, table.end[r] - begin);
    }
  }
  std::vector<std::unique_ptr<char[]>> memory_;
};

// The ring and what each rank has for itself.
struct Ring {
  explicit Ring(int ranks_)
      : ranks(ranks_),
        memory(staged::RingBytes(ranks_) / sizeof(staged::Packet)),
        counts(static_cast<size_t>(ranks_), std::vector<uint64_t>(staged::kCounts)),
        failed(static_cast<size_t>(ranks_)),
        nonfinite(static_cast<size_t>(ranks_)) {}
  staged::Place PlaceOf(int r) {
    const size_t rank = static_cast<size_t>(r);
    return {r, ranks, reinterpret_cast<char*>(memory.data()), counts[rank].data(), &failed[rank]};
  }
  const int ranks;
  std::vector<staged::Packet> memory;
  std::vector<std::vector<uint64_t>> counts;
  std::vector<uint32_t> failed, nonfinite;
};

// --- operations -----------------------------------------------------------------------------------------------------

struct Case {
  Move move;
  DType in, out;
  ReduceOp op;
  int ranks, root;
  uint64_t count;          // of the whole array
  uint64_t ranges, shift;  // see Ranges
  bool scaled, infinite;
  int blocks;
  bool in_place;
  CpuReduceSpec Spec() const {
    return {.in = in,
            .out = out,
            .op = op,
            .prescale = scaled ? 0.7 : 1,
            .postscale = scaled ? 1.3 : 1,
            .average_over = ranks,
            .check_nonfinite = IsFloatingPoint(in)};
  }
  uint64_t Begin(int rank) const { return count * static_cast<uint64_t>(rank) / static_cast<uint64_t>(ranks); }
  // Elements that a rank gives, and gets.
  uint64_t Gives(int rank) const { return move == Move::kAllGather ? Begin(rank + 1) - Begin(rank) : count; }
  uint64_t Gets(int rank) const {
    if (move == Move::kReduceScatter) return Begin(rank + 1) - Begin(rank);
    const bool nothing = (move == Move::kReduce && rank != root) || (move == Move::kBroadcast && rank == root);
    return nothing ? 0 : count;
  }
};

Case RandomCase(Move move, std::mt19937* random) {
  const auto any = [&](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(*random); };
  Case c = {};
  c.move = move;
  c.in = c.out = kAllDTypes[any(std::size(kAllDTypes))];
  const bool floats = IsFloatingPoint(c.in), reduces = staged::UsesInputs(move);
  if (reduces && floats && c.in != DType::kFloat64) c.out = kAllDTypes[1 + any(3)];
  c.op = reduces ? kAllOps[any(std::size(kAllOps))] : ReduceOp::kSum;
  c.ranks = 2 + static_cast<int>(any(3));
  c.root = static_cast<int>(any(static_cast<uint64_t>(c.ranks)));
  c.count = 1 + any(ByPackets(move) ? 1500 : any(4) == 0 ? 60'000 : 5000);
  c.ranges = 1 + any(4);
  c.shift = any(2) == 0 ? 0 : 1 + any(15);
  c.scaled = reduces && floats && (c.op == ReduceOp::kSum || c.op == ReduceOp::kAvg) && any(2) == 0;
  c.infinite = floats && any(3) == 0;
  c.blocks = 3 * static_cast<int>(1 + any(2));
  return c;
}

Bytes InputOf(const Case& c, int rank, int round) {
  Bytes bytes(c.Gives(rank) * SizeOf(c.in));
  for (uint64_t i = 0; i < c.Gives(rank); ++i) {
    const double value = IsFloatingPoint(c.in)
                             ? Awkward(rank + round, i)
                             : WholeNumber(c.in, ReduceOp::kSum, rank % 4, i + static_cast<uint64_t>(round));
    SetElement(c.in, bytes.data(), i, value);
  }
  if (c.infinite && rank == c.ranks - 1 && round == 1 && c.Gives(rank) > 0) {
    SetElement(c.in, bytes.data(), c.Gives(rank) / 2, std::numeric_limits<double>::infinity());
  }
  return bytes;
}

// The whole result, and whether it has an infinity or NaN.
Bytes ResultOf(const Case& c, const std::vector<Bytes>& in, bool* nonfinite) {
  Bytes all;
  for (const Bytes& bytes : in) all.insert(all.end(), bytes.begin(), bytes.end());
  if (c.move == Move::kBroadcast) all = in[static_cast<size_t>(c.root)];
  *nonfinite = false;
  if (!staged::UsesInputs(c.move)) return all;
  std::vector<const void*> from;
  for (const Bytes& bytes : in) from.push_back(bytes.data());
  all.assign(c.count * SizeOf(c.out), 0);
  void* const to = all.data();
  *nonfinite = CpuReduce::Create(c.Spec()).value()(from.data(), c.ranks, &to, 1, c.count);
  return all;
}

staged::Collective CollectiveOf(const Case& c, Ring* ring, int rank) {
  staged::Collective made = {};
  made.at = ring->PlaceOf(rank);
  made.move = c.move;
  made.root = c.root;
  made.count = c.count;
  for (int r = 0; r <= c.ranks; ++r) made.part_begin[r] = c.Begin(r);
  made.in_size = static_cast<int>(SizeOf(c.in));
  made.out_size = static_cast<int>(SizeOf(c.out));
  const CpuReduce::Scales scales = CpuReduce::Create(c.Spec()).value().scales();
  made.arithmetic = {.pre64 = scales.pre64,
                     .post64 = scales.post64,
                     .pre32 = scales.pre32,
                     .post32 = scales.post32,
                     .divisor = scales.divisor,
                     .in_type = static_cast<uint8_t>(c.in),
                     .out_type = static_cast<uint8_t>(c.out),
                     .op = static_cast<uint8_t>(c.op),
                     .nonfinite = IsFloatingPoint(c.out) ? &ring->nonfinite[static_cast<size_t>(rank)] : nullptr};
  PlanTiles(c.blocks, &made);
  return made;
}

// An operation of all ranks, with its arrays.
struct Operation {
  Operation(const Case& case_, Ring* ring, int round) : c(case_) {
    for (int r = 0; r < c.ranks; ++r) {
      inputs.push_back(InputOf(c, r, round));
      in.emplace_back(c.Gives(r), c.in, c.ranges, c.shift).Set(inputs.back());
      out.emplace_back(c.Gets(r), c.out, c.ranges, c.shift);
      collectives.push_back(CollectiveOf(c, ring, r));
      collectives.back().in = in.back().table;
      collectives.back().out = c.in_place ? in.back().table : out.back().table;
    }
  }
  Bytes Got(int r) const { return (c.in_place ? in : out)[static_cast<size_t>(r)].Get(); }
  const Case c;
  std::vector<Bytes> inputs;
  std::vector<Ranges> in, out;
  std::vector<staged::Collective> collectives;
};

// Several operations on one ring, which go on where the last one has ended.
void Check(const Case& c) {
  INFO("move " << static_cast<int>(c.move) << ", " << std::string(Name(c.in)) << " to " << std::string(Name(c.out))
               << ", op " << static_cast<int>(c.op) << ", " << c.ranks << " ranks, root " << c.root << ", " << c.count
               << " elements in " << c.ranges << " ranges, shift " << c.shift << ", blocks " << c.blocks);
  Ring ring(c.ranks);
  for (int round = 0; round < 3; ++round) {
    const Operation operation(c, &ring, round);
    {
      CpuKernels kernels;
      for (const staged::Collective& each : operation.collectives) {
        kernels.Launch(staged::BlocksOf(each), [&each](int index) { RunAny(each, index); });
      }
    }
    bool nonfinite = false;
    const Bytes expected = ResultOf(c, operation.inputs, &nonfinite);
    for (int r = 0; r < c.ranks; ++r) {
      const size_t begin = c.move == Move::kReduceScatter ? c.Begin(r) * SizeOf(c.out) : 0;
      const size_t bytes = c.Gets(r) * SizeOf(c.out);
      INFO("round " << round << ", rank " << r);
      CHECK(operation.Got(r) == Bytes(&expected[begin], &expected[begin] + bytes));
      CHECK(ring.failed[static_cast<size_t>(r)] == 0);
    }
    // Who gets everything that was reduced has looked at it.
    const uint32_t found = *std::max_element(ring.nonfinite.begin(), ring.nonfinite.end());
    if (staged::UsesInputs(c.move)) CHECK((found != 0) == nonfinite);
    if (c.move <= Move::kAllReducePacketsOnce)
      CHECK(ring.nonfinite == std::vector<uint32_t>(ring.nonfinite.size(), found));
    std::fill(ring.nonfinite.begin(), ring.nonfinite.end(), 0);
  }
}

}  // namespace
}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_STAGED_KERNELS_H_
