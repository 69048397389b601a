// SPDX-License-Identifier: Apache-2.0
// Copies data to where another core reads them next.
#ifndef LIBDDP_COMM_MEMORY_SHARED_WRITER_H_
#define LIBDDP_COMM_MEMORY_SHARED_WRITER_H_

#include <cstddef>

#include "libddp/comm/base/range_list.h"

namespace ddp {

// A plain store has to take its line from the core that read it last: 2 to 9 ns a line, one after the other, between
// cores of one cache, up to 30 between cores that share none. A store past the caches costs 1.5 to 7 always, but then
// the reader has to go to memory. So the writer looks how long it takes: where plain stores are slow it goes past the
// caches for a while, and then tries again. 16 KiB, written and read, take between cores of an AMD EPYC that are
// near 1.0 to 2.5 us plain, between far ones 5.5 to 9, past the caches 1.5 to 2; between cores of an Intel Xeon 3.1
// to 3.8 either way.
//
// Not thread-safe.
class SharedWriter {
 public:
  // Copies bytes [offset, offset + bytes) of the list to `to`. A later store with release order makes them visible.
  void Copy(const RangeList& from, size_t offset, char* to, size_t bytes);
  // One range, by stores past the caches (where the processor has them) as far as it covers whole lines of `to`.
  static void CopyPastCaches(const char* from, char* to, size_t bytes);
  // Whether a copy of so many bytes will be plain: its lines are worth taking back ahead of time, see PrefetchForWrite.
  bool Plain(size_t bytes) const { return past_caches_ == 0 || bytes < kLeast; }
  // From here on, until the next trial.
  void GoPastCaches() { past_caches_ = kStay; }

 private:
  static constexpr size_t kLeast = 2048;  // below, a look at the clock costs more than the copy
  static constexpr int kStay = 64;        // copies past the caches before the next trial

  int past_caches_ = 0;  // so many more copies
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MEMORY_SHARED_WRITER_H_
