// SPDX-License-Identifier: Apache-2.0
// Where the parameters and gradients that the library owns lie in memory.
#ifndef LIBDDP_REDUCER_LAYOUT_H_
#define LIBDDP_REDUCER_LAYOUT_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "ddp/types.h"

namespace ddp {

// One arena per dtype. In it, each item at a multiple of kItemAlign bytes, in the order given, the bytes between left
// zero.
inline constexpr size_t kItemAlign = 256;

struct Arena {
  DType dtype = DType::kFloat32;
  size_t bytes = 0;
};

struct Place {
  int arena = -1;  // -1: not in an arena
  size_t offset = 0;
};

struct Layout {
  std::vector<Arena> arenas;
  std::vector<Place> places;  // by item
};

// `items` by index (a count of 0 elements takes no room); `owned` tells which of them get a place; `order` is a
// permutation of the indices.
Layout LayOut(absl::Span<const Buffer> items, const std::vector<bool>& owned, absl::Span<const size_t> order);

// `buffers` in their order, those merged that lie one directly behind the other or, where both are in one of `arenas`,
// with only padding between. What lies between other buffers is not ours to touch.
std::vector<Buffer> MergeAdjacent(absl::Span<const Buffer> buffers, absl::Span<const Buffer> arenas);

// `ranges` cut into groups of at most `bytes` bytes each (0: one group), in their order. Cuts lie at multiples of
// kItemAlign from the beginning of a range.
std::vector<std::vector<Buffer>> CutPieces(absl::Span<const Buffer> ranges, size_t bytes);

}  // namespace ddp

#endif  // LIBDDP_REDUCER_LAYOUT_H_
