// SPDX-License-Identifier: Apache-2.0
// A condition variable whose time limits do not depend on the wall clock.
#ifndef LIBDDP_BASE_STEADY_CONDITION_H_
#define LIBDDP_BASE_STEADY_CONDITION_H_

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <cstdint>
#include <mutex>

#include "libddp/base/spin.h"

namespace ddp {

// std::condition_variable waits on the steady clock by a call that ThreadSanitizer does not know.
class SteadyCondition {
 public:
  SteadyCondition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~SteadyCondition() { pthread_cond_destroy(&condition_); }
  SteadyCondition(const SteadyCondition&) = delete;
  SteadyCondition& operator=(const SteadyCondition&) = delete;

  void NotifyAll() { pthread_cond_broadcast(&condition_); }

  // Waits for a NotifyAll, at most so long; may return early.
  void WaitFor(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds limit) {
    constexpr int64_t kSecond = 1'000'000'000;
    const int64_t until = NowNs() + limit.count();
    const timespec end{until / kSecond, until % kSecond};
    pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &end);
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace ddp

#endif  // LIBDDP_BASE_STEADY_CONDITION_H_
