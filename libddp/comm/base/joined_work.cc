// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/joined_work.h"

#include <algorithm>
#include <utility>

#include "libddp/comm/base/ref_counted_work.h"

namespace ddp {
namespace {

bool AllDone(const std::vector<Work>& works) {
  return std::all_of(works.begin(), works.end(), [](const Work& work) { return work.Done(); });
}

class JoinedState final : public RefCountedWork {
 public:
  JoinedState(std::vector<Work> works, std::shared_ptr<const void> memory, std::shared_ptr<OrphanedMemory> orphans)
      : RefCountedWork(1), works_(std::move(works)), memory_(std::move(memory)), orphans_(std::move(orphans)) {}
  ~JoinedState() override {
    if (orphans_ != nullptr && !Done()) orphans_->Keep(std::move(works_), std::move(memory_));
  }

  bool Done() const override { return AllDone(works_); }
  absl::Status Wait(absl::Time deadline) override {
    return First([deadline](Work& work) { return work.Wait(deadline); });
  }
  // For operations on CPU memory the host waits.
  absl::Status BlockStream(Stream stream) override {
    return First([stream](Work& work) { return work.BlockStream(stream); });
  }
  absl::Status CallStatus() const override {
    absl::Status first;
    for (const Work& work : works_) first.Update(work.call_status());
    return first;
  }

 private:
  template <typename Fn>
  absl::Status First(Fn&& outcome_of) {
    absl::Status first;
    for (Work& work : works_) first.Update(outcome_of(work));
    return first;
  }

  std::vector<Work> works_;
  std::shared_ptr<const void> memory_;
  const std::shared_ptr<OrphanedMemory> orphans_;
};

}  // namespace

void OrphanedMemory::Keep(std::vector<Work> works, std::shared_ptr<const void> memory) {
  const std::lock_guard lock(mutex_);
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [](const auto& kept) { return AllDone(kept.first); }),
              kept_.end());
  kept_.emplace_back(std::move(works), std::move(memory));
}

Work JoinWorks(std::vector<Work> works, std::shared_ptr<const void> memory, std::shared_ptr<OrphanedMemory> orphans) {
  return Work(new JoinedState(std::move(works), std::move(memory), std::move(orphans)));
}

}  // namespace ddp
