// Which of several ways to do the same is the fastest.
#ifndef EXAMPLES_NN_TRIAL_H_
#define EXAMPLES_NN_TRIAL_H_

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"

namespace nn {

// The index of the fastest of `count` ways, where time(i) tries way i and says how long that took, or nothing where the
// way fails; none where all do.
//
// One way is tried after the other, in several rounds, and the shortest of a way's times counts: neither a clock that
// still rises nor a disturbance is to the disadvantage of the way that just had its turn. One that has taken several
// times as long as the best, more than clocks differ by, is not tried again.
inline std::optional<size_t> FastestOf(size_t count, absl::FunctionRef<std::optional<float>(size_t)> time) {
  constexpr int kRounds = 5;
  constexpr float kHopeless = 4, kNever = std::numeric_limits<float>::infinity();
  std::vector<float> shortest(count, kNever);
  float best = kNever;
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < count; ++i) {
      const bool hopeless = shortest[i] == kNever || shortest[i] > kHopeless * best;
      if (round > 0 && hopeless) continue;
      // One that fails, if only now, is out.
      const std::optional<float> now = time(i);
      shortest[i] = now.has_value() ? std::min(shortest[i], *now) : kNever;
      best = *std::min_element(shortest.begin(), shortest.end());
    }
  }
  if (best == kNever) return std::nullopt;
  return std::min_element(shortest.begin(), shortest.end()) - shortest.begin();
}

}  // namespace nn

#endif  // EXAMPLES_NN_TRIAL_H_
