// SPDX-License-Identifier: Apache-2.0
// Who drives pending work, and what is left to whom.
#include "libddp/comm/base/driver.h"

#include <memory>
#include <string>

#include "tests/support/catch.h"

namespace ddp {
namespace {

using Found = ProgressThread::Found;

class FakeWork final : public CountedWork {
 public:
  absl::Status Wait(absl::Time) override { return status(); }
  ~FakeWork() override = default;
};

// Finishes its work in the pass with the number `done_after`; it makes no progress before.
class FakeDriver final : public Driver {
 public:
  FakeDriver(int done_after, ProgressThread* progress)
      : Driver({.name = "rank 3", .oversubscribed = true}, progress), done_after_(done_after) {
    pending_ = 1;
  }
  absl::Status WaitFor(absl::Time deadline) {
    return Wait(
        work, [] { return std::string("the work"); }, deadline);
  }

  FakeWork work;
  int passes = 0, background = 0, checks = 0;
  bool in_exchange = false;

 private:
  bool Poll(Lock&, const Pass& pass) override {
    background += pass.background ? 1 : 0;
    if (++passes != done_after_) return false;
    pending_ = 0;
    work.Finish(absl::OkStatus());
    return true;
  }
  void CheckHealth(int64_t, bool) override { ++checks; }
  bool InExchange() const override { return in_exchange; }

  const int done_after_;
};

TEST_CASE("a thread that waits drives, and looks after the peers once that takes long") {
  ProgressThread progress;
  FakeDriver soon(3, &progress), late(1000, &progress);
  int idle = 0;
  soon.SetIdleCallback([&] { ++idle; });
  CHECK(soon.WaitFor(absl::InfiniteFuture()).ok());
  CHECK(soon.passes == 3);
  CHECK(soon.checks == 0);
  CHECK(idle == 2);
  CHECK(late.WaitFor(absl::InfiniteFuture()).ok());
  CHECK(late.checks > 0);
  CHECK(late.WaitFor(absl::InfinitePast()).ok());  // it is done
}

TEST_CASE("a wait ends at its deadline, the work goes on") {
  ProgressThread progress;
  FakeDriver driver(2, &progress);
  const absl::Status status = driver.WaitFor(absl::InfinitePast());
  CHECK(status.message() == "rank 3: the work is not done yet; it goes on");
  CHECK(absl::IsDeadlineExceeded(status));
  driver.Progress();
  CHECK(driver.WaitFor(absl::InfinitePast()).ok());
}

TEST_CASE("the progress thread leaves alone what the program drives") {
  ProgressThread progress;
  FakeDriver driver(4, &progress);
  driver.Progress();
  CHECK(driver.Tick() == Found::kPending);
  CHECK(driver.background == 0);
  CHECK(driver.Tick() == Found::kPending);  // nobody has driven since the last look
  CHECK(driver.background == 1);
  driver.in_exchange = true;  // it stays until the next piece comes
  CHECK(driver.Tick() == Found::kWork);
  CHECK(driver.passes == 4);
  CHECK(driver.Tick() == Found::kNothing);
  CHECK(driver.passes == 5);  // peers may have sent something
  CHECK(driver.checks >= 1);
  driver.Progress();
  CHECK(driver.passes == 5);  // nothing is pending
}

}  // namespace
}  // namespace ddp
