#include "libddp/comm/progress_thread.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

namespace ddp {
namespace {

constexpr std::chrono::milliseconds kTick(1), kRest(100);
constexpr int kTicksBeforeRest = 200;

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

void ProgressThread::Run() {
  pthread_setname_np(pthread_self(), "ddp-progress");
  std::unique_lock<std::mutex> lock(mutex_);
  for (int idle = 0; !stop_;) {
    const bool rest = idle >= kTicksBeforeRest;
    resting_.store(rest, std::memory_order_relaxed);
    // system_clock: ThreadSanitizer does not know the wait on the steady one. A clock that jumps makes one look early
    // or late.
    wake_.wait_until(lock, std::chrono::system_clock::now() + (rest ? kRest : kTick));
    const bool woken = rest && !resting_.exchange(false, std::memory_order_relaxed);
    bool pending = false;
    for (Client* client : clients_) pending |= client->Tick();
    idle = pending || woken ? 0 : std::min(idle + 1, kTicksBeforeRest);
  }
}

}  // namespace ddp
