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
  if (past_caches_ > 0) {
    --past_caches_;
    size_t contiguous = 0;
    const char* const data = from.At(0, &contiguous);
    const bool can = contiguous >= bytes && reinterpret_cast<uintptr_t>(to) % kCacheLine == 0;
    return can ? CopyPastCaches(data, to, bytes) : from.CopyOut(0, to, bytes);
  }
  const int64_t start = NowNs();
  from.CopyOut(0, to, bytes);
  if (NowNs() - start > static_cast<int64_t>(bytes / kCacheLine) * kSlowLineNs) past_caches_ = kStay;
}

}  // namespace ddp
