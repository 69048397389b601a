// Compiled once for each instruction set, and the best one is taken at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/slice_sum.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <hwy/highway.h>

#include "bench/meeting.h"
#include "bench/slice_sum.h"

HWY_BEFORE_NAMESPACE();
namespace bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// buffers[k][i] = sum over r of buffers[r][i], for every k. kRanks 0: known at run time only.
template <size_t kRanks>
void AddSlice(float* const* buffers, size_t ranks, size_t begin, size_t end) {
  const hn::ScalableTag<float> d;
  const size_t n = kRanks > 0 ? kRanks : ranks;
  float* HWY_RESTRICT base[kMaxRanks];
  for (size_t r = 0; r < n; ++r) base[r] = buffers[r];
  size_t i = begin;
  for (; i + hn::Lanes(d) <= end; i += hn::Lanes(d)) {
    auto sum = hn::LoadU(d, base[0] + i);
    for (size_t r = 1; r < n; ++r) sum = hn::Add(sum, hn::LoadU(d, base[r] + i));
    for (size_t r = 0; r < n; ++r) hn::StoreU(sum, d, base[r] + i);
  }
  for (; i < end; ++i) {
    float sum = base[0][i];
    for (size_t r = 1; r < n; ++r) sum += base[r][i];
    for (size_t r = 0; r < n; ++r) base[r][i] = sum;
  }
}

void AddAll(float* const* buffers, size_t ranks, size_t begin, size_t end) {
  switch (ranks) {
    case 2:
      return AddSlice<2>(buffers, ranks, begin, end);
    case 3:
      return AddSlice<3>(buffers, ranks, begin, end);
    case 4:
      return AddSlice<4>(buffers, ranks, begin, end);
    case 8:
      return AddSlice<8>(buffers, ranks, begin, end);
    default:
      return AddSlice<0>(buffers, ranks, begin, end);
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

// Three pages between the buffers: where they are exactly 256 MiB apart, some processors take eleven times as long.
constexpr size_t kPad = 3 * 4096;

// Beginnings of slices lie on cache lines.
constexpr size_t kLineFloats = 16;

size_t Stride(size_t max_bytes) { return (max_bytes + kPad + 63) / 64 * 64; }

}  // namespace

size_t SliceSum::Bytes(int ranks, size_t max_bytes) { return kHead + static_cast<size_t>(ranks) * Stride(max_bytes); }

SliceSum::SliceSum(char* memory, int rank, int ranks, size_t max_bytes)
    : memory_(memory),
      rank_(rank),
      ranks_(ranks),
      stride_(Stride(max_bytes)),
      spins_(Oversubscribed(ranks) ? 0 : 20000) {}

float* SliceSum::Buffer(int rank) const {
  return reinterpret_cast<float*>(memory_ + kHead + static_cast<size_t>(rank) * stride_);
}

void SliceSum::Meet() {
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

void SliceSum::Run(size_t count) {
  float* buffers[kMaxRanks];
  for (int r = 0; r < ranks_; ++r) buffers[r] = Buffer(r);
  const size_t ranks = static_cast<size_t>(ranks_);
  const auto begin = [&](size_t r) { return r == ranks ? count : count / ranks * r / kLineFloats * kLineFloats; };
  const size_t rank = static_cast<size_t>(rank_);
  Meet();
  HWY_DYNAMIC_DISPATCH(AddAll)(buffers, ranks, begin(rank), begin(rank + 1));
  Meet();
}

}  // namespace bench
#endif  // HWY_ONCE
