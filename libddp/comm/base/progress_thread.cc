// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/progress_thread.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

namespace ddp {
namespace {

constexpr ProgressThread::Interval kShortest(1), kLongestPending(4), kLongest(8), kRest(100), kIdleBeforeRest(200);

}  // namespace

ProgressThread::~ProgressThread() {
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    stop_ = true;
  }
  wake_.NotifyAll();
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

// Under the mutex, so that the thread is not between its look at this and its wait. Not under that of the Ticks: they
// launch things themselves, and wait for mutexes whose owners do.
void ProgressThread::WakeUp() {
  std::lock_guard<std::mutex> lock(wake_mutex_);
  resting_.store(false);
  wake_.NotifyAll();
}

ProgressThread::Interval ProgressThread::NextLook(Interval last, Found found) {
  if (found == Found::kWork) return kShortest;
  if (found == Found::kNothing) return std::min(2 * last, kLongest);
  // What has been launched since the last look may be left alone.
  return last > kLongestPending ? kShortest : std::min(2 * last, kLongestPending);
}

void ProgressThread::Run() {
  pthread_setname_np(pthread_self(), "ddp-progress");
  Interval interval = kShortest, idle(0);
  while (true) {
    const bool idles = idle >= kIdleBeforeRest;
    resting_.store(idles);
    Found found = Found::kNothing;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (Client* client : clients_) found = std::max(found, client->Tick());
    }
    if (found != Found::kNothing) resting_.store(false);
    idle = found != Found::kNothing ? Interval(0) : std::min(idle + interval, kIdleBeforeRest);
    interval = NextLook(interval, found);
    std::unique_lock<std::mutex> lock(wake_mutex_);
    if (stop_) return;
    const bool rest = resting_.load();
    // Who has launched something meanwhile is looked at next.
    if (rest || !idles || found != Found::kNothing) wake_.WaitFor(lock, rest ? kRest : interval);
    if (stop_) return;
    if (idles && !resting_.load()) {  // woken
      idle = Interval(0);
      interval = kShortest;
    }
  }
}

}  // namespace ddp
