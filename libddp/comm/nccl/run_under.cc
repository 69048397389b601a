// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/run_under.h"

#include <pthread.h>

#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/time/clock.h"

namespace ddp {

absl::Status RunUnder(absl::Time deadline, const std::function<absl::Status()>& interrupted, const std::string& what,
                      std::function<absl::Status()> work) {
  struct Shared {
    std::mutex mutex;
    std::optional<absl::Status> result;
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, work = std::move(work)] {
    pthread_setname_np(pthread_self(), "ddp-nccl-init");
    absl::Status result = work();
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->result = std::move(result);
  }).detach();
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(shared->mutex);
      if (shared->result.has_value()) return *shared->result;
    }
    if (absl::Status s = interrupted(); !s.ok()) return s;
    if (absl::Now() >= deadline) return absl::DeadlineExceededError(what);
    absl::SleepFor(absl::Milliseconds(1));
  }
}

}  // namespace ddp
