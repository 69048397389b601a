// SPDX-License-Identifier: Apache-2.0
// Finds the fastest of several alternatives.
#ifndef EXAMPLES_NN_TRIAL_H_
#define EXAMPLES_NN_TRIAL_H_

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"

namespace nn {

// Returns the index of the fastest of `count` alternatives; nothing if all fail. time(i) tries alternative i and
// returns its time, or nothing if it fails.
//
// Alternatives take turns, in several rounds, and the shortest time of each counts. So a rising clock frequency or a
// disturbance does not favour any of them. An alternative that took several times as long as the best, which is more
// than clock frequencies differ, is not tried again.
inline std::optional<size_t> FastestOf(size_t count, absl::FunctionRef<std::optional<float>(size_t)> time) {
  constexpr int kRounds = 5;
  constexpr float kHopeless = 4, kNever = std::numeric_limits<float>::infinity();
  std::vector<float> shortest(count, kNever);
  float best = kNever;
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < count; ++i) {
      const bool hopeless = shortest[i] == kNever || shortest[i] > kHopeless * best;
      if (round > 0 && hopeless) continue;
      // An alternative that fails in any round is excluded.
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
