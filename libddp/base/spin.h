// SPDX-License-Identifier: Apache-2.0
// What a thread does while it waits for another core.
#ifndef LIBDDP_BASE_SPIN_H_
#define LIBDDP_BASE_SPIN_H_

#include <sched.h>
#include <time.h>

#include <cstddef>
#include <cstdint>

namespace ddp {

inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Nanoseconds on the clock that all processes of a host share.
inline int64_t NowNs() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

// Waits a little longer each time: first in the processor, then by giving it away, at last asleep. Where there are more
// ranks than processors the first stage would only keep the awaited rank from running, so it is left out.
class Backoff {
 public:
  explicit Backoff(bool oversubscribed) : spins_left_(oversubscribed ? 0 : kSpins) {}

  void Pause() {
    if (spins_left_ > 0) {
      --spins_left_;
      CpuRelax();
    } else if (++yields_ < kYields) {
      sched_yield();
    } else {
      const timespec nap{0, kNapNs};
      nanosleep(&nap, nullptr);
    }
  }

  // True once waiting takes so long that a look at the clock and at the peers' health costs nothing. Every call is one
  // look.
  bool TimeToLook() {
    if (spins_left_ > 0) return false;
    if (yields_ >= kYields) return true;
    return (yields_ & 127) == 127;
  }

  // False in the first fraction of a microsecond, in which a peer that runs will take up its own part of the work.
  bool PeerHadItsChance() const { return spins_left_ <= kSpins - 64; }

 private:
  static constexpr int kSpins = 4000;   // about 100 us with the work of a look between
  static constexpr int kYields = 4000;  // some milliseconds
  static constexpr long kNapNs = 50'000;

  int spins_left_;
  int yields_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_BASE_SPIN_H_
