#include "libddp/reducer/layout.h"

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

std::vector<Buffer> MergeAdjacent(absl::Span<const Buffer> buffers) {
  std::vector<Buffer> merged;
  for (const Buffer& b : buffers) {
    if (b.count == 0) continue;
    const size_t size = SizeOf(b.dtype);
    char* const begin = static_cast<char*>(b.data);
    if (!merged.empty() && merged.back().dtype == b.dtype) {
      Buffer& last = merged.back();
      char* const last_begin = static_cast<char*>(last.data);
      char* const last_end = last_begin + last.count * size;
      if (begin >= last_end && begin < last_end + kItemAlign) {
        last.count = static_cast<size_t>(begin - last_begin) / size + b.count;
        continue;
      }
    }
    merged.push_back(b);
  }
  return merged;
}

}  // namespace ddp
