// SPDX-License-Identifier: Apache-2.0
// The thread that does a process's communication while none of its own threads does.
#ifndef LIBDDP_COMM_BASE_PROGRESS_THREAD_H_
#define LIBDDP_COMM_BASE_PROGRESS_THREAD_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/steady_condition.h"

namespace ddp {

// Looks at its engines once a millisecond while that is needed, less often where the program's own threads do the work,
// ten times a second where nothing is launched. It takes over only where nobody has driven an engine since its last
// look: waking it per operation would cost 20 to 35 us each, and a second thread on the core would take time from the
// backward pass. On a virtual machine each look costs as much or more, 85 us where it was measured. Thread-safe.
class ProgressThread {
 public:
  using Interval = std::chrono::milliseconds;

  enum class Found : uint8_t {
    kNothing,  // is pending
    kPending,  // but nothing to be done: the program's threads do it, or a peer has not come
    kWork,     // that nobody else did
  };

  class Client {
   public:
    virtual ~Client() = default;
    // Does pending work that nobody else is doing.
    virtual Found Tick() = 0;
  };

  // How long to wait after a look that found this, where the wait before it was `last`.
  static Interval NextLook(Interval last, Found found);

  ProgressThread() = default;
  // `elsewhere`: progress that the program expects of its own communication while it waits in a call of ours.
  explicit ProgressThread(std::function<void()> elsewhere) : elsewhere_(std::move(elsewhere)) {}
  ~ProgressThread();

  // For a thread of the program that has been waiting for some time: calls `elsewhere`. The caller holds no mutex.
  void WhileWaiting() const {
    if (elsewhere_) elsewhere_();
  }

  void Add(Client* client);
  // Returns when no Tick of the client is running, nor will be.
  void Remove(Client* client);

  // Something has been launched, and the next Tick of the client finds it. Costs a load, unless the thread rests. Waits
  // for no Tick: a Tick may call it, or wait for a mutex that the caller holds.
  void Notify() {
    if (resting_.load()) WakeUp();
  }

 private:
  void WakeUp();
  void Run();

  const std::function<void()> elsewhere_;
  // Set before the Ticks that a long wait follows. What they miss is launched later, and so Notify sees this.
  std::atomic<bool> resting_{false};
  std::mutex mutex_;  // Ticks run under it
  std::vector<Client*> clients_;
  std::mutex wake_mutex_;
  SteadyCondition wake_;
  bool stop_ = false;   // under wake_mutex_
  std::thread thread_;  // started with the first client
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_PROGRESS_THREAD_H_
