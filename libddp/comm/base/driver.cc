// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/driver.h"

#include <sched.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libddp/base/spin.h"

namespace ddp {
namespace {

// How long the progress thread stays after the last progress while the peers work on the same.
constexpr int64_t kStayNs = 200'000;
constexpr int64_t kCheckEveryNs = 1'000'000;

}  // namespace

absl::Status Driver::Wait(const CountedWork& work, absl::FunctionRef<std::string()> describe, absl::Time deadline) {
  const bool bounded = deadline != absl::InfiniteFuture();
  Backoff backoff(driver_options_.oversubscribed);
  while (!work.Done()) {
    bool progressed = false;
    NoteDriven();
    if (Lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      progressed = Poll(lock, {.awaited = &work, .steal = backoff.PeerHadItsChance()});
      if (!progressed && backoff.TimeToLook()) CheckHealthInTime(/*background=*/false);
    }
    if (wanted_.load(std::memory_order_relaxed) > 0) sched_yield();
    if (work.Done()) break;
    if (bounded && absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(driver_options_.name, ": ", describe(), " is not done yet; it goes on"));
    }
    if (progressed) {
      backoff = Backoff(driver_options_.oversubscribed);
      continue;
    }
    if (idle_callback_) idle_callback_();
    if (backoff.TimeToLook()) progress_->WhileWaiting();
    backoff.Pause();
  }
  return work.status();
}

void Driver::CheckHealthInTime(bool background) {
  const int64_t now = NowNs();
  if (now < next_check_ns_) return;
  next_check_ns_ = now + kCheckEveryNs;
  CheckHealth(now, background);
}

void Driver::Progress(bool steal) {
  if (pending_.load(std::memory_order_acquire) == 0) return;
  NoteDriven();
  if (Lock lock(mutex_, std::try_to_lock); lock.owns_lock()) Poll(lock, {.steal = steal});
}

Driver::Lock Driver::LockToCall() {
  wanted_.fetch_add(1);
  NoteDriven();
  Lock lock(mutex_);
  wanted_.fetch_sub(1);
  return lock;
}

// What threads of the program have driven since the last look is left to them. Polls also when nothing is pending:
// peers may have sent something.
ProgressThread::Found Driver::Tick() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return ProgressThread::Found::kPending;
  const bool pending = pending_.load(std::memory_order_acquire) > 0;
  const uint64_t driven = driven_.load(std::memory_order_relaxed);
  const bool left_alone = std::exchange(driven_at_tick_, driven) == driven;
  const bool worked = (left_alone || !pending) && PollAlone(lock, driven);
  CheckHealthInTime(/*background=*/true);
  if (worked || (pending && left_alone && driver_options_.looks_each_tick)) return ProgressThread::Found::kWork;
  return pending ? ProgressThread::Found::kPending : ProgressThread::Found::kNothing;
}

// Polls until there is nothing more to do for now, or a thread of the program drives.
bool Driver::PollAlone(Lock& lock, uint64_t driven) {
  bool worked = false;
  for (int64_t stay_until = NowNs() + kStayNs;;) {
    const bool progressed = Poll(lock, {.steal = true, .background = true});
    worked |= progressed;
    if (progressed) stay_until = NowNs() + kStayNs;
    if (driven_.load(std::memory_order_relaxed) != driven || pending_.load(std::memory_order_acquire) == 0)
      return worked;
    if (!progressed && (!InExchange() || NowNs() > stay_until)) return worked;
    lock.unlock();
    if (!progressed) sched_yield();
    lock.lock();
  }
}

}  // namespace ddp
