// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/layout.h"

#include <algorithm>

namespace ddp {

Layout LayOut(absl::Span<const Buffer> items, const std::vector<bool>& owned, absl::Span<const size_t> order) {
  Layout layout;
  layout.places.resize(items.size());
  for (size_t i : order) {
    if (!owned[i]) continue;
    size_t arena = 0;
    while (arena < layout.arenas.size() && layout.arenas[arena].dtype != items[i].dtype) ++arena;
    if (arena == layout.arenas.size()) layout.arenas.push_back({items[i].dtype, 0});
    size_t& end = layout.arenas[arena].bytes;
    layout.places[i] = {static_cast<int>(arena), end};
    end += (items[i].count * SizeOf(items[i].dtype) + kItemAlign - 1) / kItemAlign * kItemAlign;
  }
  return layout;
}

std::vector<Buffer> MergeAdjacent(absl::Span<const Buffer> buffers, absl::Span<const Buffer> arenas) {
  const auto end_of = [](const Buffer& b) { return static_cast<char*>(b.data) + b.count * SizeOf(b.dtype); };
  const auto in_one_arena = [&](const char* begin, const char* end) {
    return std::any_of(arenas.begin(), arenas.end(), [&](const Buffer& arena) {
      return static_cast<const char*>(arena.data) <= begin && end <= end_of(arena);
    });
  };
  std::vector<Buffer> merged;
  for (const Buffer& b : buffers) {
    if (b.count == 0) continue;
    if (!merged.empty() && merged.back().dtype == b.dtype) {
      Buffer& last = merged.back();
      char* const begin = static_cast<char*>(b.data);
      const bool padded = begin > end_of(last) && begin < end_of(last) + kItemAlign &&
                          in_one_arena(static_cast<char*>(last.data), end_of(b));
      if (begin == end_of(last) || padded) {
        last.count = static_cast<size_t>(begin - static_cast<char*>(last.data)) / SizeOf(b.dtype) + b.count;
        continue;
      }
    }
    merged.push_back(b);
  }
  return merged;
}

std::vector<std::vector<Buffer>> CutPieces(absl::Span<const Buffer> ranges, size_t bytes) {
  if (bytes == 0) return {std::vector<Buffer>(ranges.begin(), ranges.end())};
  const size_t most = std::max(bytes / kItemAlign * kItemAlign, kItemAlign);
  std::vector<std::vector<Buffer>> pieces(1);
  size_t filled = 0;  // bytes of the last piece
  for (Buffer rest : ranges) {
    const size_t size = SizeOf(rest.dtype);
    do {
      const size_t fits = (most - filled) / kItemAlign * kItemAlign;
      if (fits == 0) {
        pieces.emplace_back();
        filled = 0;
        continue;
      }
      Buffer part = rest;
      part.count = std::min(rest.count, fits / size);
      pieces.back().push_back(part);
      filled += part.count * size;
      rest.data = static_cast<char*>(rest.data) + part.count * size;
      rest.count -= part.count;
    } while (rest.count > 0);
  }
  return pieces;
}

}  // namespace ddp
