// SPDX-License-Identifier: Apache-2.0
// Several memory ranges that stand end to end as one logical array.
#ifndef LIBDDP_COMM_BASE_RANGE_LIST_H_
#define LIBDDP_COMM_BASE_RANGE_LIST_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "ddp/types.h"

namespace ddp {

class RangeList {
 public:
  // A range that begins where the last one ends becomes part of it.
  void Add(char* data, size_t bytes) {
    if (bytes == 0) return;
    if (Range* const last = size_ > 1 ? &many_.back() : &first_; size_ > 0 && last->data + last->bytes == data) {
      last->bytes += bytes;
      last->end += bytes;
      return;
    }
    if (size_ == 0) {
      first_ = {data, bytes, bytes};
    } else {
      if (size_ == 1) many_.push_back(first_);
      many_.push_back({data, many_.back().end + bytes, bytes});
    }
    ++size_;
  }

  // Bytes [offset, offset + bytes) of another list.
  void AddFrom(const RangeList& from, size_t offset, size_t bytes) {
    from.Walk(offset, bytes, [this](char* data, size_t n) { Add(data, n); });
  }

  size_t bytes() const { return size_ == 0 ? 0 : (end() - 1)->end; }

  // The address of byte `offset`, and in *contiguous how many bytes follow it in its range.
  char* At(size_t offset, size_t* contiguous) const {
    const Range* range = begin();
    if (size_ > 1) {
      range = std::upper_bound(begin(), end(), offset, [](size_t value, const Range& r) { return value < r.end; });
    }
    *contiguous = range->end - offset;
    return range->data + (range->bytes - *contiguous);
  }

  // Whether the two have memory in common.
  bool Overlaps(const RangeList& other) const {
    return std::any_of(begin(), end(), [&](const Range& a) {
      return std::any_of(other.begin(), other.end(),
                         [&](const Range& b) { return a.data < b.data + b.bytes && b.data < a.data + a.bytes; });
    });
  }

  // Calls fn(data, bytes) for each range, in order; stops and returns false when it does.
  template <typename Fn>
  bool ForEach(Fn&& fn) const {
    return std::all_of(begin(), end(), [&](const Range& r) { return fn(r.data, r.bytes); });
  }
  size_t ranges() const { return size_; }

  // Calls fn(data, bytes) for each piece of bytes [offset, offset + bytes), in order.
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

  const Range* begin() const { return size_ > 1 ? many_.data() : &first_; }
  const Range* end() const { return begin() + size_; }

  // One range is by far the usual case, and has to cost nothing.
  size_t size_ = 0;
  Range first_{};
  std::vector<Range> many_;
};

// The elements [first, first + count) of what the buffers hold end to end.
inline std::vector<Buffer> Slice(Buffers buffers, size_t first, size_t count) {
  std::vector<Buffer> slice;
  for (const Buffer& b : buffers) {
    const size_t begin = std::min(first, b.count), end = std::min(first + count, b.count);
    if (begin < end) {
      slice.push_back({static_cast<char*>(b.data) + begin * SizeOf(b.dtype), end - begin, b.dtype, b.device});
    }
    first -= begin;
    count -= end - begin;
  }
  return slice;
}

// The memory of `buffers`.
inline RangeList Ranges(Buffers buffers) {
  RangeList list;
  for (const Buffer& b : buffers) list.Add(static_cast<char*>(b.data), b.count * SizeOf(b.dtype));
  return list;
}

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_RANGE_LIST_H_
