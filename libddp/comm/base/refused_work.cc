#include <atomic>
#include <utility>

#include "ddp/process_group.h"

namespace ddp {
namespace {

// A call that was refused.
class RefusedWork final : public internal::WorkState {
 public:
  explicit RefusedWork(absl::Status error) : error_(std::move(error)) {}

  bool Done() const override { return true; }
  absl::Status Wait(absl::Time) override { return error_; }
  absl::Status BlockStream(Stream) override { return error_; }
  absl::Status CallStatus() const override { return error_; }
  void Ref() override { refs_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() override {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  ~RefusedWork() override = default;

  const absl::Status error_;
  std::atomic<int> refs_{1};
};

}  // namespace

Work::Work(absl::Status error) : state_(error.ok() ? nullptr : new RefusedWork(std::move(error))) {}

}  // namespace ddp
