// SPDX-License-Identifier: Apache-2.0
// Pages and cache lines.
#ifndef LIBDDP_BASE_PAGE_H_
#define LIBDDP_BASE_PAGE_H_

#include <unistd.h>

#include <cstddef>

#include "libddp/base/round.h"

namespace ddp {

inline constexpr size_t kCacheLine = 64;

// 4 KiB as a rule; 16 or 64 KiB on some arm64 machines.
inline size_t PageSize() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Memory of this size and more is laid out for the kernel's transparent huge pages.
inline constexpr size_t kHugePage = size_t{2} << 20;

struct PageSpan {
  size_t begin = 0, end = 0;
};

// The whole pages that [offset, offset + bytes) touches.
constexpr PageSpan WholePages(size_t offset, size_t bytes, size_t page) {
  return {offset / page * page, RoundUp(offset + bytes, page)};
}

}  // namespace ddp

#endif  // LIBDDP_BASE_PAGE_H_
