// SPDX-License-Identifier: Apache-2.0
// How often the progress thread looks.
#include "libddp/comm/base/progress_thread.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <vector>

#include "libddp/base/spin.h"
#include "tests/support/catch.h"

namespace {
std::atomic<int> wall_clock_ahead{0};  // seconds
// How far this thread's steady clock is ahead of the kernel's, asked at each reading. Moves the end of its waits.
thread_local const std::function<int()>* steady_clock_ahead = nullptr;
}  // namespace

// What this program takes for the wall clock may be ahead of the kernel's, as after somebody has set that back.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += wall_clock_ahead.load();
  if (clock == CLOCK_MONOTONIC && steady_clock_ahead != nullptr) time->tv_sec += (*steady_clock_ahead)();
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

// Once the thread rests, a Tick launches something itself, or waits for another thread that does.
class Launching final : public ProgressThread::Client {
 public:
  Launching(ProgressThread& progress, bool itself) : progress_(progress), itself_(itself) {}
  Found Tick() override {
    constexpr int64_t kRestsAfterNs = 500'000'000;
    if (begin_ns_ == 0) begin_ns_ = NowNs();
    if (launched_ || NowNs() - begin_ns_ < kRestsAfterNs) return Found::kNothing;
    inside_ = true;
    if (itself_) {
      progress_.Notify();
      launched_ = true;
    }
    for (int i = 0; i < 10'000 && !launched_; ++i) usleep(1000);
    if (!launched_) in_vain_ = true;
    return Found::kNothing;
  }
  bool inside() const { return inside_; }
  bool in_vain() const { return in_vain_; }
  void Launched() { launched_ = true; }

 private:
  ProgressThread& progress_;
  const bool itself_;
  int64_t begin_ns_ = 0;
  std::atomic<bool> inside_{false}, launched_{false}, in_vain_{false};
};

TEST_CASE("a Tick may launch something, and wait for a thread that does") {
  for (const bool itself : {false, true}) {
    ProgressThread progress;
    Launching client(progress, itself);
    progress.Add(&client);
    while (!client.inside()) usleep(1000);
    progress.Notify();
    client.Launched();
    progress.Remove(&client);
    CHECK_FALSE(client.in_vain());
  }
}

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

// Lets the thread rest after some looks without a wait. Once it rests, nothing but Notify ends its wait.
class Rests final : public ProgressThread::Client {
 public:
  ProgressThread::Found Tick() override {
    steady_clock_ahead = &before_wait_;
    looks_ += 1;
    if (!launched_.exchange(false)) return ProgressThread::Found::kNothing;
    looks_ = 0;
    catch_before_wait_ = !catch_before_wait_;
    return ProgressThread::Found::kWork;
  }

  // Launches something once the thread rests, or in turn while it is between its last look and its wait. Whether that
  // is found.
  bool Launch(ProgressThread& progress) {
    if (!Until([this] { return resting_.exchange(false); })) return false;
    usleep(1000);  // the thread goes to sleep
    launched_ = true;
    notified_ = true;
    progress.Notify();
    return Until([this] { return !launched_; });
  }
  void Stop() { stop_ = true; }

 private:
  static constexpr int kLooksBeforeRest = 100, kHour = 3600;

  // On the progress thread, between a look and the wait.
  int BeforeWait() {
    if (looks_ < kLooksBeforeRest) return -1;
    notified_ = false;
    resting_ = true;
    if (catch_before_wait_) {
      Until([this] { return notified_ || stop_; });
      usleep(1000);  // Notify goes as far as it can
    }
    return kHour;
  }

  template <typename Done>
  static bool Until(const Done& done) {
    for (int i = 0; i < 100'000; ++i) {  // 10 s or more
      if (done()) return true;
      usleep(100);
    }
    return false;
  }

  const std::function<int()> before_wait_ = [this] { return BeforeWait(); };
  int looks_ = 0;  // since something was found
  bool catch_before_wait_ = false;
  std::atomic<bool> launched_{false}, notified_{false}, resting_{false}, stop_{false};
};

TEST_CASE("Notify wakes a thread that rests, or is about to") {
  Rests client;
  ProgressThread progress;
  progress.Add(&client);
  bool found = true;
  for (int round = 0; round < 50 && found; ++round) {
    INFO("round " << round << (round % 2 == 0 ? ", at rest" : ", about to rest"));
    found = client.Launch(progress);
    CHECK(found);
  }
  client.Stop();
}

TEST_CASE("what is found pending after a long wait is looked at again soon") {
  CHECK(Waits(8, {Found::kPending, Found::kPending, Found::kWork}) == std::vector<int>{1, 2, 1});
}

}  // namespace
}  // namespace ddp
