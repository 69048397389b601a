// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"
#include "ddp/store.h"
#include "libddp/launch/store_limits.h"

namespace ddp {
namespace {

constexpr char kWhere[] = "the in-memory store";

class MemoryStore final : public Store {
 public:
  absl::Status Set(absl::string_view key, absl::string_view value, absl::Time /*deadline*/) override {
    if (absl::Status s = CheckStoreLimits(kWhere, key, value.size()); !s.ok()) return s;
    {
      std::lock_guard lock(mutex_);
      values_[std::string(key)] = std::string(value);
    }
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override {
    if (absl::Status s = CheckStoreLimits(kWhere, key, 0); !s.ok()) return s;
    std::unique_lock lock(mutex_);
    // On the system clock, which absl::Time is of anyway: a wait on the steady clock is one that ThreadSanitizer does
    // not know.
    while (true) {
      const auto it = values_.find(key);
      if (it != values_.end()) return it->second;
      if (absl::Now() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("no rank has set key '", key, "' of the in-memory store in time; is every rank started?"));
      }
      changed_.wait_until(lock, absl::ToChronoTime(deadline));
    }
  }

  absl::StatusOr<int64_t> Add(absl::string_view key, int64_t delta, absl::Time /*deadline*/) override {
    if (absl::Status s = CheckStoreLimits(kWhere, key, sizeof(delta)); !s.ok()) return s;
    std::lock_guard lock(mutex_);
    int64_t& total = counters_[std::string(key)];
    const absl::StatusOr<int64_t> sum = CounterAfterAdd(kWhere, key, total, delta);
    if (sum.ok()) total = *sum;
    return sum;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string, std::less<>> values_;
  std::map<std::string, int64_t> counters_;
};

}  // namespace

std::shared_ptr<Store> CreateMemoryStore() { return std::make_shared<MemoryStore>(); }

}  // namespace ddp
