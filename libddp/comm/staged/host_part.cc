// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/host_part.h"

#include <pthread.h>

#include <chrono>
#include <utility>

#include "libddp/base/spin.h"

namespace ddp {
namespace {

constexpr size_t kCounterBytes = 3 * 64;

}  // namespace

absl::StatusOr<std::shared_ptr<HostPart>> HostPart::Create(DeviceRuntime& runtime) {
  std::shared_ptr<HostPart> part(new HostPart(runtime));
  absl::StatusOr<std::shared_ptr<void>> counters = runtime.AllocatePinned(kCounterBytes);
  if (!counters.ok()) return counters.status();
  part->counters_ = *std::move(counters);
  return part;
}

HostPart::~HostPart() { Stop(); }

void HostPart::Start(const uint32_t* failed, uint64_t* left) {
  failed_ = failed;
  left_ = left;
  thread_ = std::thread([this] { Run(); });
}

absl::StatusOr<uint32_t> HostPart::HandOver(void* stream, Job job) {
  if (absl::Status s = runtime_.Increment(handed_over(), stream); !s.ok()) return s;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.NotifyAll();
  return ++number_;
}

absl::Status HostPart::Await(uint32_t number, void* stream) {
  return runtime_.AwaitCounter(handed_back(), number, released(), left_, stream);
}

absl::Status HostPart::status(absl::Duration ago) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return NowNs() - failed_ns_ < absl::ToInt64Nanoseconds(ago) ? absl::OkStatus() : status_;
}

void HostPart::Release() { std::atomic_ref<uint32_t>(*released()).store(1); }

void HostPart::Leave() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    leave_ = true;
  }
  changed_.NotifyAll();
}

void HostPart::Stop() {
  Leave();
  if (thread_.joinable()) thread_.join();
}

bool HostPart::MustLeave() const {
  return leave_.load() || std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(failed_)).load() != 0;
}

// Waits for the stream.
bool HostPart::Reached(uint32_t number) {
  const std::atomic_ref<uint32_t> handed_over(*this->handed_over());
  for (Backoff backoff(/*oversubscribed=*/false); !MustLeave(); backoff.Pause()) {
    if (static_cast<int32_t>(handed_over.load(std::memory_order_acquire) - number) >= 0) return !MustLeave();
  }
  return false;
}

void HostPart::Run() {
  pthread_setname_np(pthread_self(), "ddp-host");
  for (uint32_t number = 1;; ++number) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (jobs_.empty() && !leave_) changed_.WaitFor(lock, std::chrono::hours(1));
      if (leave_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    if (!Reached(number)) return;
    if (absl::Status s = job(); !s.ok()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      status_ = std::move(s);
      failed_ns_ = NowNs();
      return;
    }
    std::atomic_ref<uint32_t>(*handed_back()).store(number, std::memory_order_release);
  }
}

}  // namespace ddp
