// SPDX-License-Identifier: Apache-2.0
// Which of several ways is found to be the fastest.
#include "examples/nn/trial.h"

#include <optional>
#include <vector>

#include "tests/support/catch.h"

namespace {

using Times = std::vector<float>;

// The choice among ways that take so long, where `change` may change the time of the n-th trial.
template <class Change>
std::optional<size_t> Choose(const Times& times, const Change& change) {
  int trials = 0;
  return nn::FastestOf(times.size(), [&](size_t i) -> std::optional<float> { return change(trials++, i, times[i]); });
}

}  // namespace

TEST_CASE("The fastest way is found, the first of equals, and none among none") {
  const auto as_they_are = [](int, size_t, float time) { return time; };
  CHECK(Choose({3, 1, 2}, as_they_are) == 1);
  CHECK(Choose({1, 1}, as_they_are) == 0);
  CHECK(Choose({5}, as_they_are) == 0);
  CHECK(Choose({}, as_they_are) == std::nullopt);
}

TEST_CASE("A clock that rises during the trial and disturbances do not decide it") {
  const Times times = {1.0f, 1.2f, 1.1f, 9, 1.3f};
  CHECK(Choose(times, [](int trial, size_t, float time) { return trial < 2 ? 3.5f * time : time; }) == 0);
  for (int disturbed = 0; disturbed < 12; ++disturbed) {
    INFO(disturbed);
    CHECK(Choose(times, [&](int trial, size_t, float time) { return trial == disturbed ? 3 * time : time; }) == 0);
  }
}

TEST_CASE("A way that fails, at first or later, is not taken, and neither it nor a hopeless one is tried for ever") {
  const Times times = {2, 1, 3, 50};
  std::vector<int> trials(4);
  const auto choose = [&](int last_good_trial) {
    trials.assign(4, 0);
    return Choose(times, [&](int, size_t i, float time) -> std::optional<float> {
      if (++trials[i] > last_good_trial && i == 1) return std::nullopt;
      return time;
    });
  };
  CHECK(choose(0) == 0);
  CHECK(trials == std::vector<int>{5, 1, 5, 1});
  CHECK(choose(2) == 0);
  CHECK(trials == std::vector<int>{5, 3, 5, 1});
  CHECK(choose(100) == 1);
  CHECK(nn::FastestOf(2, [](size_t) { return std::optional<float>(); }) == std::nullopt);
}
