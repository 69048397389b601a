// How long threads stay with what makes no progress.
#ifndef LIBDDP_COMM_BASE_WAITING_H_
#define LIBDDP_COMM_BASE_WAITING_H_

#include <cstddef>

namespace ddp {

// How often a waiting thread looks at one word before it lets others have the mutex: about half a microsecond.
inline constexpr int kGlances = 32;
// Up to so many bytes are copied or reduced without releasing the mutex: that is over too soon for a release to pay.
inline constexpr size_t kBriefBytes = size_t{64} << 10;

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_WAITING_H_
