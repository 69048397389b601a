// How the pieces of an operation are cut, and the reduction of arrays that consist of several ranges.
#ifndef LIBDDP_COMM_HOST_OPERATION_INL_H_
#define LIBDDP_COMM_HOST_OPERATION_INL_H_

#include <algorithm>
#include <cstddef>

#include "absl/container/inlined_vector.h"
#include "libddp/base/round.h"
#include "libddp/device/cpu_reduce.h"

namespace ddp {

// Slices begin at multiples of so many elements: whole cache lines for every type.
inline constexpr size_t kSliceAlign = 64;

// The share of rank r in a round of `n` elements.
struct Share {
  size_t begin, end;
};
inline Share ShareOf(size_t n, int r, int ranks) {
  const size_t per_rank = RoundUp(CeilDiv(n, static_cast<size_t>(ranks)), kSliceAlign);
  const size_t begin = std::min(n, per_rank * static_cast<size_t>(r));
  return {begin, std::min(n, begin + per_rank)};
}

// Reduces `count` elements from every `ins` list to every `outs` list, stretch by stretch where ranges end at different
// places.
template <typename InAt, typename OutAt>
bool ReduceLists(const CpuReduce& reduce, int ins, InAt in_at, size_t in_size, int outs, OutAt out_at, size_t out_size,
                 size_t count) {
  absl::InlinedVector<const void*, 16> from(static_cast<size_t>(ins));
  absl::InlinedVector<void*, 16> to(static_cast<size_t>(outs));
  bool nonfinite = false;
  for (size_t at = 0; at < count;) {
    size_t n = count - at;
    for (int r = 0; r < ins; ++r) {
      size_t contiguous = 0;
      from[static_cast<size_t>(r)] = in_at(r, at, &contiguous);
      n = std::min(n, contiguous / in_size);
    }
    for (int r = 0; r < outs; ++r) {
      size_t contiguous = 0;
      to[static_cast<size_t>(r)] = out_at(r, at, &contiguous);
      n = std::min(n, contiguous / out_size);
    }
    nonfinite |= reduce(from.data(), ins, to.data(), outs, n);
    at += n;
  }
  return nonfinite;
}

}  // namespace ddp

#endif  // LIBDDP_COMM_HOST_OPERATION_INL_H_
