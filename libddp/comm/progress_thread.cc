#include "libddp/comm/progress_thread.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

namespace ddp {
namespace {

constexpr ProgressThread::Interval kShortest(1), kLongestPending(4), kLongest(8), kRest(100), kIdleBeforeRest(200);

}  // namespace

ProgressThread::~ProgressThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ProgressThread::Add(Client* client) {
  std::lock_guard<std::mutex> lock(mutex_);
  clients_.push_back(client);
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
}

void ProgressThread::Remove(Client* client) {
  // Ticks run under the mutex, so none is running now.
  std::lock_guard<std::mutex> lock(mutex_);
  clients_.erase(std::remove(clients_.begin(), clients_.end(), client), clients_.end());
}

void ProgressThread::WakeUp() {
  resting_.store(false, std::memory_order_relaxed);
  wake_.notify_all();
}

ProgressThread::Interval ProgressThread::NextLook(Interval last, Found found) {
  if (found == Found::kWork) return kShortest;
  if (found == Found::kNothing) return std::min(2 * last, kLongest);
  // What has been launched since the last look may be left alone.
  return last > kLongestPending ? kShortest : std::min(2 * last, kLongestPending);
}

void ProgressThread::Run() {
  pthread_setname_np(pthread_self(), "ddp-progress");
  std::unique_lock<std::mutex> lock(mutex_);
  Interval interval = kShortest, idle(0);
  while (!stop_) {
    const bool rest = idle >= kIdleBeforeRest;
    resting_.store(rest, std::memory_order_relaxed);
    // system_clock: ThreadSanitizer does not know the wait on the steady one. A clock that jumps makes one look early
    // or late.
    wake_.wait_until(lock, std::chrono::system_clock::now() + (rest ? kRest : interval));
    const bool woken = rest && !resting_.exchange(false, std::memory_order_relaxed);
    Found found = Found::kNothing;
    for (Client* client : clients_) found = std::max(found, client->Tick());
    idle = found != Found::kNothing || woken ? Interval(0) : std::min(idle + interval, kIdleBeforeRest);
    interval = woken ? kShortest : NextLook(interval, found);
  }
}

}  // namespace ddp
