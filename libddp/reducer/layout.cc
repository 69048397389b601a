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

}  // namespace ddp
