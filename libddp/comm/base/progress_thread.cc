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
    std::lock_guard<std::mutex> lock(mutex_);
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

// Under the mutex, so that the thread is not between its last look and its wait.
void ProgressThread::WakeUp() {
  std::lock_guard<std::mutex> lock(mutex_);
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
  std::unique_lock<std::mutex> lock(mutex_);
  Interval interval = kShortest, idle(0);
  while (!stop_) {
    resting_.store(idle >= kIdleBeforeRest);
    Found found = Found::kNothing;
    for (Client* client : clients_) found = std::max(found, client->Tick());
    if (found != Found::kNothing) resting_.store(false);
    const bool rest = resting_.load();
    idle = found != Found::kNothing ? Interval(0) : std::min(idle + interval, kIdleBeforeRest);
    interval = NextLook(interval, found);
    wake_.WaitFor(lock, rest ? kRest : interval);
    if (rest && !resting_.load()) {  // woken
      idle = Interval(0);
      interval = kShortest;
    }
  }
}

}  // namespace ddp
