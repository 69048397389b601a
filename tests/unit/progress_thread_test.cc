// How often the progress thread looks.
#include "libddp/comm/base/progress_thread.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "tests/support/catch.h"

namespace {
std::atomic<int> wall_clock_ahead{0};  // seconds
}  // namespace

// What this program takes for the wall clock may be ahead of the kernel's, as after somebody has set that back.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += wall_clock_ahead.load();
  return result;
}

namespace ddp {
namespace {

using Found = ProgressThread::Found;
using Interval = ProgressThread::Interval;

// The waits after looks that found this, from a wait of `ms` on.
std::vector<int> Waits(int ms, const std::vector<Found>& looks) {
  std::vector<int> waits;
  Interval last(ms);
  for (const Found found : looks) {
    last = ProgressThread::NextLook(last, found);
    waits.push_back(static_cast<int>(last.count()));
  }
  return waits;
}

TEST_CASE("looks that are needed come each millisecond, others less often") {
  CHECK(Waits(1, {Found::kWork, Found::kWork, Found::kWork}) == std::vector<int>{1, 1, 1});
  CHECK(Waits(8, {Found::kWork}) == std::vector<int>{1});
  CHECK(Waits(1, std::vector<Found>(5, Found::kNothing)) == std::vector<int>{2, 4, 8, 8, 8});
  CHECK(Waits(1, std::vector<Found>(4, Found::kPending)) == std::vector<int>{2, 4, 4, 4});
}

class Looks final : public ProgressThread::Client {
 public:
  ProgressThread::Found Tick() override {
    ++looks_;
    return ProgressThread::Found::kWork;
  }
  // Whether there is another look soon, on the clock that nobody sets.
  bool GoOn() const {
    const int before = looks_;
    for (int i = 0; i < 2000 && looks_ == before; ++i) usleep(1000);
    return looks_ > before;
  }

 private:
  std::atomic<int> looks_{0};
};

TEST_CASE("a wall clock that is set back does not stop the looks") {
  Looks looks;
  ProgressThread progress;
  progress.Add(&looks);
  CHECK(looks.GoOn());
  wall_clock_ahead = 3600;
  CHECK(looks.GoOn());  // one may have been waiting already
  CHECK(looks.GoOn());
  wall_clock_ahead = 0;
  progress.Remove(&looks);
}

TEST_CASE("what is found pending after a long wait is looked at again soon") {
  CHECK(Waits(8, {Found::kPending, Found::kPending, Found::kWork}) == std::vector<int>{1, 2, 1});
}

}  // namespace
}  // namespace ddp
