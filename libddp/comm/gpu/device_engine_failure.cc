// SPDX-License-Identifier: Apache-2.0
// What becomes of a DeviceEngine whose group fails.
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/base/spin.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/gpu/device_work.h"

namespace ddp {

// What a stream does after the failed operation must be able to know of it: the word comes before the release, and
// before a report that may take long.
void DeviceEngine::TellStreams() {
  failing_.store(true, std::memory_order_release);
  std::atomic_ref<uint32_t>(*words()).store(1, std::memory_order_seq_cst);
  if (options_.board != nullptr) options_.board->PostFailed();
}

void DeviceEngine::Fail(const absl::Status& error) {
  if (failed_.load(std::memory_order_acquire)) return;
  TellStreams();
  const absl::Status why = options_.world_ranks.Named(error, options_.rank);
  if (options_.board != nullptr && options_.observer != nullptr) options_.board->TellFailure(why, *options_.observer);
  std::vector<DeviceWork*> ended;
  std::unique_lock<std::mutex> lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  failure_ = options_.board == nullptr ? why : options_.board->Fail(why);
  failed_ns_ = NowNs();
  failed_.store(true, std::memory_order_release);
  LogWarn("rank ", options_.rank, ": the group failed: ", failure_.message());
  for (DeviceWork* work : pending_) {
    if (work->state.load(std::memory_order_relaxed) != DeviceWork::kPending) continue;
    work->Ref();
    ended.push_back(work);
  }
  std::thread([self = shared_from_this(), why = failure_] {
    pthread_setname_np(pthread_self(), "ddp-abort");
    if (const std::shared_ptr<InternalGroup> control = self->options_.control.lock()) control->Fail(why);
    const DeviceGuard guard(self->runtime(), self->options_.device);
    self->runtime().LeaveCapturesAlone().IgnoreError();
    self->AbortTransport(why);
    const std::lock_guard<std::mutex> locked(self->mutex_);
    self->released_ = true;
    self->changed_.NotifyAll();
  }).detach();
  lock.unlock();
  for (DeviceWork* work : ended) {
    Note(*work, FlightState::kFailed);
    work->Unref();
  }
}

// What runs may still use the callers' memory, so it is given the time to leave. What is handed on is no result: the
// peers know first.
void DeviceEngine::AbortTransport(const absl::Status& why) {
  if (options_.transport == nullptr) return;
  if (options_.transport->HandsOn() && options_.board != nullptr) options_.board->LetThemKnow();
  options_.transport->Abort(why);
  DeviceWork* newest = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.empty()) return;
    newest = pending_.back();
    newest->Ref();
  }
  AwaitLeaving(newest->event);
  newest->Unref();
}

// Whether what is before the event is through, within the time that kernels get to leave.
bool DeviceEngine::AwaitLeaving(const OwnedEvent& event) const {
  const int64_t until = NowNs() + absl::ToInt64Nanoseconds(leave_time());
  const DeviceGuard guard(runtime(), options_.device);
  if (!guard.status().ok()) return false;
  while (true) {
    const absl::StatusOr<bool> finished = runtime().Finished(event.get());
    if (!finished.ok() || *finished) return finished.ok();
    if (NowNs() >= until) return false;
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
  }
}

// A kernel that leaves because a peer has failed sets the word. The peer's cause is known by then.
void DeviceEngine::HeedDevice() {
  if (failing_.load(std::memory_order_acquire) || std::atomic_ref<uint32_t>(*words()).load() == 0) return;
  Fail(absl::AbortedError(absl::StrCat("rank ", options_.rank, ": another rank has ended the group")));
}

absl::Status DeviceEngine::status() {
  HeedDevice();
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

// The abort has told the kernels by then, but what the stream has to do for the program may come before them.
absl::Status DeviceEngine::AwaitFree() {
  const int64_t until = NowNs() + absl::ToInt64Nanoseconds(options_.abort_grace + leave_time());
  bool released = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!released_ && NowNs() < until) changed_.WaitFor(lock, std::chrono::nanoseconds(until - NowNs()));
    released = released_;
  }
  if (released && captured_) return absl::OkStatus();  // a graph may be launched at any time
  const DeviceGuard guard(runtime(), options_.device);
  if (!guard.status().ok()) return guard.status();
  absl::StatusOr<OwnedEvent> end = MakeEvent(runtime());
  if (!end.ok()) return end.status();
  if (absl::Status s = runtime().Record(end->get(), stream_.get()); !s.ok()) return s;
  while (true) {
    const absl::StatusOr<bool> finished = runtime().Finished(end->get());
    if (!finished.ok()) return finished.status();
    if (*finished) return absl::OkStatus();
    if (NowNs() >= until) break;
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
  }
  const std::string why = options_.transport == nullptr ? "" : options_.transport->WhyStuck();
  return absl::InternalError(absl::StrCat(name(), ": GPU ", options_.device.index,
                                          " has not come free after the group failed", why.empty() ? "" : " (", why,
                                          why.empty() ? "" : ")", "; end this process, and start from a checkpoint"));
}

}  // namespace ddp
