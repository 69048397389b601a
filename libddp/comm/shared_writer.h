// Copies data to where another core reads them next.
#ifndef LIBDDP_COMM_SHARED_WRITER_H_
#define LIBDDP_COMM_SHARED_WRITER_H_

#include <cstddef>

#include "libddp/comm/range_list.h"

namespace ddp {

// A plain store has to take its line from the core that read it last: 2 to 9 ns a line, one after the other, between
// cores of one cache, up to 30 between cores that share none. A store past the caches costs 1.5 always, but then the
// reader has to go to memory. So the writer looks how long it takes: where plain stores are slow it goes past the
// caches for a while, and then tries again. On an AMD EPYC 16 KiB, written and read, take 1.0 to 2.5 us plain between
// near cores and 5.5 to 9 between far ones, past the caches 1.5 to 2.
//
// Not thread-safe.
class SharedWriter {
 public:
  // The first `bytes` of the list to `to`. What is written afterwards with release order is seen after them.
  void Copy(const RangeList& from, char* to, size_t bytes);
  // One range, to the beginning of a line, by stores past the caches (where the processor has them).
  static void CopyPastCaches(const char* from, char* to, size_t bytes);
  // Whether it is worth while to take lines back ahead of time, see PrefetchForWrite.
  bool plain() const { return past_caches_ == 0; }

 private:
  int past_caches_ = 0;  // so many more copies
};

}  // namespace ddp

#endif  // LIBDDP_COMM_SHARED_WRITER_H_
