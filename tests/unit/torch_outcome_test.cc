// SPDX-License-Identifier: Apache-2.0
// The PyTorch backend's poll, which needs neither PyTorch nor a GPU.
#include <optional>

#include "python/src/outcome.h"
#include "tests/support/catch.h"

namespace {

// Ends between two looks at it: Wait says that the time is over, and then it is done.
class EndsLate final : public ddp::internal::WorkState {
 public:
  EndsLate(int looks, absl::Status outcome) : looks_(looks), outcome_(std::move(outcome)) {}
  bool Done() const override { return looks_-- <= 0; }
  absl::Status Wait(absl::Time deadline) override {
    ++waits;
    if (looks_ <= 0 || deadline == absl::InfiniteFuture()) return outcome_;
    looks_ = 0;
    return absl::DeadlineExceededError("not yet");
  }
  absl::Status BlockStream(ddp::Stream) override { return absl::OkStatus(); }
  void Ref() override {}
  void Unref() override {}

  int waits = 0;

 private:
  mutable int looks_;
  absl::Status outcome_;
};

}  // namespace

TEST_CASE("An operation that ends just after its time has the outcome with which it ended", "[outcome]") {
  EndsLate late(5, absl::OkStatus());
  ddp::Work work(&late);
  const std::optional<absl::Status> outcome = ddp_torch::OutcomeBy(work, absl::Now() + absl::Seconds(1));
  REQUIRE(outcome.has_value());
  CHECK(outcome->ok());

  EndsLate fails(5, absl::AbortedError("planted"));
  ddp::Work failing(&fails);
  CHECK(ddp_torch::OutcomeBy(failing, absl::Now() + absl::Seconds(1)) == absl::AbortedError("planted"));
}

TEST_CASE("A poll does not wait, and an operation that has not ended has no outcome", "[outcome]") {
  EndsLate late(5, absl::OkStatus());
  ddp::Work work(&late);
  CHECK_FALSE(ddp_torch::OutcomeBy(work, absl::InfinitePast()).has_value());
  CHECK(late.waits == 0);
  ddp::Work ended;
  CHECK(ddp_torch::OutcomeBy(ended, absl::InfinitePast()) == absl::OkStatus());
}
