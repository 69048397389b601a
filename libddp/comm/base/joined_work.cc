#include "libddp/comm/base/joined_work.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace ddp {
namespace {

class JoinedState final : public internal::WorkState {
 public:
  JoinedState(std::vector<Work> works, std::shared_ptr<const void> memory)
      : works_(std::move(works)), memory_(std::move(memory)) {}

  bool Done() const override {
    return std::all_of(works_.begin(), works_.end(), [](const Work& work) { return work.Done(); });
  }
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
  void Ref() override { refs_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() override {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  template <typename Fn>
  absl::Status First(Fn&& outcome_of) {
    absl::Status first;
    for (Work& work : works_) first.Update(outcome_of(work));
    return first;
  }

  std::vector<Work> works_;
  const std::shared_ptr<const void> memory_;
  std::atomic<int> refs_{1};
};

}  // namespace

Work JoinWorks(std::vector<Work> works, std::shared_ptr<const void> memory) {
  return Work(new JoinedState(std::move(works), std::move(memory)));
}

}  // namespace ddp
