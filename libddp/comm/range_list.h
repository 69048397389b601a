// Several memory ranges that stand end to end as one logical array.
#ifndef LIBDDP_COMM_RANGE_LIST_H_
#define LIBDDP_COMM_RANGE_LIST_H_

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "absl/container/inlined_vector.h"

namespace ddp {

class RangeList {
 public:
  void Clear() { ranges_.clear(); }
  void Add(char* data, size_t bytes) {
    if (bytes > 0) ranges_.push_back({data, end() + bytes, bytes});
  }

  size_t bytes() const { return end(); }

  // The address of byte `offset`, and in *contiguous how many bytes follow it in its range.
  char* At(size_t offset, size_t* contiguous) const {
    const Range* range = ranges_.begin();
    if (ranges_.size() > 1) {
      range = std::upper_bound(ranges_.begin(), ranges_.end(), offset,
                               [](size_t value, const Range& r) { return value < r.end; });
    }
    *contiguous = range->end - offset;
    return range->data + (range->bytes - *contiguous);
  }

  // Whether the two have memory in common.
  bool Overlaps(const RangeList& other) const {
    for (const Range& a : ranges_) {
      for (const Range& b : other.ranges_) {
        if (a.data < b.data + b.bytes && b.data < a.data + a.bytes) return true;
      }
    }
    return false;
  }

  // Calls fn(data, bytes) for each range, in order; stops and returns false when it does.
  template <typename Fn>
  bool ForEach(Fn&& fn) const {
    return std::all_of(ranges_.begin(), ranges_.end(), [&](const Range& r) { return fn(r.data, r.bytes); });
  }
  size_t ranges() const { return ranges_.size(); }

  void CopyOut(size_t offset, char* to, size_t bytes) const {
    Walk(offset, bytes, [&](char* here, size_t n) {
      std::memcpy(to, here, n);
      to += n;
    });
  }
  void CopyIn(size_t offset, const char* from, size_t bytes) const {
    Walk(offset, bytes, [&](char* here, size_t n) {
      std::memcpy(here, from, n);
      from += n;
    });
  }
  // From one list to another; bytes that already lie in place are left alone.
  void CopyTo(size_t offset, const RangeList& to, size_t to_offset, size_t bytes) const {
    Walk(offset, bytes, [&](char* here, size_t n) {
      to.Walk(to_offset, n, [&](char* there, size_t m) {
        if (here != there) std::memcpy(there, here, m);
        here += m;
      });
      to_offset += n;
    });
  }

 private:
  struct Range {
    char* data;
    size_t end;  // of the logical array, in bytes
    size_t bytes;
  };

  size_t end() const { return ranges_.empty() ? 0 : ranges_.back().end; }

  template <typename Fn>
  void Walk(size_t offset, size_t bytes, Fn&& fn) const {
    while (bytes > 0) {
      size_t contiguous = 0;
      char* const here = At(offset, &contiguous);
      const size_t n = std::min(bytes, contiguous);
      fn(here, n);
      offset += n;
      bytes -= n;
    }
  }

  absl::InlinedVector<Range, 1> ranges_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_RANGE_LIST_H_
