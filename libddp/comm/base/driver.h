// SPDX-License-Identifier: Apache-2.0
// How pending work is driven: by threads of the program that wait for it or call in passing, and by the progress thread
// while none of them does.
#ifndef LIBDDP_COMM_BASE_DRIVER_H_
#define LIBDDP_COMM_BASE_DRIVER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "libddp/comm/base/counted_work.h"
#include "libddp/comm/base/progress_thread.h"

namespace ddp {

struct DriverOptions {
  std::string name;              // what messages call this rank: "rank 1"
  bool oversubscribed = false;   // more ranks than processors: never spin
  bool looks_each_tick = false;  // whether what is pending needs a look every millisecond
};

// Thread-safe. A derived class calls progress_->Add when it is complete and progress_->Remove before it is destroyed.
class Driver : public ProgressThread::Client {
 public:
  // Drives until `work` is done and returns its outcome, or DeadlineExceeded with what `describe` returns; then the
  // work goes on.
  absl::Status Wait(const CountedWork& work, absl::FunctionRef<std::string()> describe, absl::Time deadline);

  // One pass over what is pending, unless another thread is at it.
  void Progress(bool steal = false);

  ProgressThread::Found Tick() final;

  // Called where a thread that waits has nothing else to do. To be set before anything is launched.
  void SetIdleCallback(std::function<void()> callback) { idle_callback_ = std::move(callback); }

 protected:
  using Lock = std::unique_lock<std::mutex>;

  struct Pass {
    const CountedWork* awaited = nullptr;  // what the thread waits for; null: everything
    bool steal = false;                    // also do what peers have not begun of their part
    bool background = false;               // this is the progress thread
  };

  Driver(const DriverOptions& options, ProgressThread* progress) : driver_options_(options), progress_(progress) {}

  // Locks the mutex ahead of threads that only drive, and makes the progress thread leave.
  Lock LockToCall();

  // The following are called with the mutex held. They may release it for a while.

  // Does what can be done without waiting; returns whether anything was.
  virtual bool Poll(Lock& lock, const Pass& pass) = 0;
  // Called about every millisecond where waiting has become long, and by Tick: has the group failed, has a peer died,
  // is time up?
  virtual void CheckHealth(int64_t now_ns, bool background) = 0;
  // Whether the peers are working on the same, so that the next piece comes soon.
  virtual bool InExchange() const = 0;

  ProgressThread* progress() const { return progress_; }

  mutable std::mutex mutex_;
  std::atomic<int> pending_{0};  // above 0: there is something to drive

 private:
  void NoteDriven() { driven_.store(driven_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  bool PollAlone(Lock& lock, uint64_t driven);
  void CheckHealthInTime(bool background);

  const DriverOptions driver_options_;
  ProgressThread* const progress_;
  std::function<void()> idle_callback_;
  std::atomic<int> wanted_{0};       // threads in LockToCall
  std::atomic<uint64_t> driven_{0};  // changes whenever a thread of the program drives
  uint64_t driven_at_tick_ = 0;
  int64_t next_check_ns_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_DRIVER_H_
