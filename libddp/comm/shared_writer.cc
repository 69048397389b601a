#include "libddp/comm/shared_writer.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "libddp/base/spin.h"
#include "libddp/comm/control_block.h"

namespace ddp {
namespace {

constexpr int64_t kSlowLineNs = 12;  // a plain store of a line
constexpr int kStay = 64;            // copies past the caches before the next trial

}  // namespace

#if defined(__x86_64__)
void SharedWriter::CopyPastCaches(const char* from, char* to, size_t bytes) {
  const size_t whole = bytes / kCacheLine * kCacheLine;
  for (size_t at = 0; at < whole; at += kCacheLine) {
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

void SharedWriter::Copy(const RangeList& from, char* to, size_t bytes) {
  if (bytes < kLeast) return from.CopyOut(0, to, bytes);
  size_t contiguous = 0;
  const char* const data = from.At(0, &contiguous);
  const bool past_caches = past_caches_ > 0;
  past_caches_ -= past_caches ? 1 : 0;
  if (past_caches && contiguous >= bytes && reinterpret_cast<uintptr_t>(to) % kCacheLine == 0) {
    return CopyPastCaches(data, to, bytes);
  }
  const int64_t start = NowNs();
  from.CopyOut(0, to, bytes);
  const bool slow = NowNs() - start > static_cast<int64_t>(bytes / kCacheLine) * kSlowLineNs;
  // (A copy in the meantime, of several ranges, found lines that nobody had taken back ahead of time.)
  if (slow && !past_caches) past_caches_ = kStay;
}

}  // namespace ddp
