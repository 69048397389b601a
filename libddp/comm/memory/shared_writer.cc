// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/memory/shared_writer.h"
#include "libddp/base/page.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "libddp/base/spin.h"

namespace ddp {
namespace {

// A plain store of a line; and of more data than the nearest caches hold, which have to be fetched from further away.
constexpr int64_t kSlowLineNs = 12, kSlowFarLineNs = 24;
constexpr size_t kNearBytes = size_t{32} << 10;

}  // namespace

#if defined(__x86_64__)
void SharedWriter::CopyPastCaches(const char* from, char* to, size_t bytes) {
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kCacheLine);
  const size_t whole = head + (bytes - head) / kCacheLine * kCacheLine;
  std::memcpy(to, from, head);
  for (size_t at = head; at < whole; at += kCacheLine) {
    for (size_t k = at; k < at + kCacheLine; k += sizeof(__m128i)) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + k), value);
    }
  }
  std::memcpy(to + whole, from + whole, bytes - whole);
  _mm_sfence();  // a store with release order alone does not wait for these
}
#else
void SharedWriter::CopyPastCaches(const char* from, char* to, size_t bytes) { std::memcpy(to, from, bytes); }
#endif

void SharedWriter::Copy(const RangeList& from, size_t offset, char* to, size_t bytes) {
  if (bytes < kLeast) return from.CopyOut(offset, to, bytes);
  if (past_caches_ > 0) {
    --past_caches_;
    return from.Walk(offset, bytes, [&](const char* here, size_t n) {
      CopyPastCaches(here, to, n);
      to += n;
    });
  }
  const int64_t start = NowNs();
  from.CopyOut(offset, to, bytes);
  const int64_t slow = bytes <= kNearBytes ? kSlowLineNs : kSlowFarLineNs;
  if (NowNs() - start > static_cast<int64_t>(bytes / kCacheLine) * slow) GoPastCaches();
}

}  // namespace ddp
