// SPDX-License-Identifier: Apache-2.0
// Compiled once for each instruction set, and the best one is taken at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/shared_bound.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <hwy/highway.h>

#include <cstring>

#include "bench/meeting.h"
#include "bench/shared_bound.h"

HWY_BEFORE_NAMESPACE();
namespace bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// outs[k][i] = sum over r of ins[r][i], for every k, or for 0 only. kRanks 0: known at run time only. An output is an
// input or overlaps none.
template <size_t kRanks>
void AddSlice(float* const* ins, size_t ranks, float* const* outs, bool to_all, size_t begin, size_t end) {
  const hn::ScalableTag<float> d;
  const size_t n = kRanks > 0 ? kRanks : ranks;
  float *from[kMaxRanks], *to[kMaxRanks];  // copies, which no store can change
  for (size_t r = 0; r < n; ++r) from[r] = ins[r];
  for (size_t k = 0; k < n; ++k) to[k] = outs[to_all ? k : 0];
  size_t i = begin;
  for (; i + hn::Lanes(d) <= end; i += hn::Lanes(d)) {
    auto sum = hn::LoadU(d, from[0] + i);
    for (size_t r = 1; r < n; ++r) sum = hn::Add(sum, hn::LoadU(d, from[r] + i));
    hn::StoreU(sum, d, to[0] + i);
    if (!to_all) continue;
    for (size_t k = 1; k < n; ++k) hn::StoreU(sum, d, to[k] + i);
  }
  for (; i < end; ++i) {
    float sum = from[0][i];
    for (size_t r = 1; r < n; ++r) sum += from[r][i];
    for (size_t k = 0; k < (to_all ? n : 1); ++k) to[k][i] = sum;
  }
}

void AddAll(float* const* ins, size_t ranks, float* const* outs, bool to_all, size_t begin, size_t end) {
  switch (ranks) {
    case 2:
      return AddSlice<2>(ins, ranks, outs, to_all, begin, end);
    case 3:
      return AddSlice<3>(ins, ranks, outs, to_all, begin, end);
    case 4:
      return AddSlice<4>(ins, ranks, outs, to_all, begin, end);
    case 8:
      return AddSlice<8>(ins, ranks, outs, to_all, begin, end);
    default:
      return AddSlice<0>(ins, ranks, outs, to_all, begin, end);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace bench {
HWY_EXPORT(AddAll);

namespace {

struct alignas(64) Flag {
  std::atomic<uint32_t> turn;
};

constexpr size_t kHead = 4096;
static_assert(kMaxRanks * sizeof(Flag) <= kHead);

// Three pages between the arrays: where they are exactly 256 MiB apart, some processors take eleven times as long.
constexpr size_t kPad = 3 * 4096;

// Beginnings of slices lie on cache lines.
constexpr size_t kLineFloats = 16;

size_t Stride(size_t max_bytes) { return (max_bytes + kPad + 63) / 64 * 64; }

}  // namespace

size_t SharedBound::Bytes(int ranks, size_t max_bytes, bool out_of_place) {
  return kHead + static_cast<size_t>(out_of_place ? 2 * ranks : ranks) * Stride(max_bytes);
}

SharedBound::SharedBound(char* memory, int rank, int ranks, size_t max_bytes)
    : memory_(memory),
      rank_(rank),
      ranks_(ranks),
      stride_(Stride(max_bytes)),
      spins_(Oversubscribed(ranks) ? 0 : 20000) {}

Case SharedBound::Like(const Case& c) {
  Case like = c;
  like.dtype = ddp::DType::kFloat32;
  like.op = ddp::ReduceOp::kSum;
  if (c.collective == Collective::kAllToAll) like.in_place = false;
  like.SetBytes(c.bytes());
  return like;
}

float* SharedBound::Array(int index) const {
  return reinterpret_cast<float*>(memory_ + kHead + static_cast<size_t>(index) * stride_);
}

void SharedBound::Meet() {
  Flag* const flags = reinterpret_cast<Flag*>(memory_);
  const uint32_t mine = ++turn_;
  flags[rank_].turn.store(mine, std::memory_order_release);
  for (int r = 0; r < ranks_; ++r) {
    // Turns only grow, and nobody is 2^31 of them ahead.
    for (Patience patience(spins_); static_cast<int32_t>(flags[r].turn.load(std::memory_order_acquire) - mine) < 0;) {
      patience.Pause();
    }
  }
}

void SharedBound::Sum(const Case& c) const {
  const size_t ranks = static_cast<size_t>(ranks_), rank = static_cast<size_t>(rank_), count = c.count();
  const bool scatters = c.collective == Collective::kReduceScatter;
  const size_t shift = scatters && !c.in_place ? c.offsets[rank] : 0;  // the output begins with this rank's part
  float *ins[kMaxRanks], *outs[kMaxRanks];
  for (int r = 0; r < ranks_; ++r) {
    ins[r] = Array(r) + shift;
    outs[r] = OutArray(c, r);
  }
  if (scatters) {
    return HWY_DYNAMIC_DISPATCH(AddAll)(ins, ranks, outs + rank, false, c.offsets[rank] - shift,
                                        c.offsets[rank + 1] - shift);
  }
  const auto begin = [&](size_t r) { return r == ranks ? count : count / ranks * r / kLineFloats * kLineFloats; };
  const bool to_all = c.collective == Collective::kAllReduce;
  HWY_DYNAMIC_DISPATCH(AddAll)(ins, ranks, to_all ? outs : outs + c.root, to_all, begin(rank), begin(rank + 1));
}

void SharedBound::Copy(const Case& c, const std::vector<Segment>& results) const {
  for (const Segment& segment : results) {
    if (c.in_place && segment.rank == rank_) continue;
    std::memcpy(Out(c) + segment.to, Array(segment.rank) + c.InOffset(segment.rank) + segment.from,
                segment.count * sizeof(float));
  }
}

void SharedBound::Run(const Case& c, const std::vector<Segment>& results) {
  Meet();
  if (c.collective == Collective::kBarrier) return;
  if (c.collective == Collective::kPingPong) {
    if (rank_ % 2 == 1) Copy(c, results);
    Meet();
    if (rank_ % 2 == 0) Copy(c, results);
  } else if (c.info().reduces) {
    Sum(c);
  } else {
    Copy(c, results);
  }
  Meet();
}

}  // namespace bench
#endif  // HWY_ONCE
