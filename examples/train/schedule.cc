// SPDX-License-Identifier: Apache-2.0
#include "examples/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace examples {

double ScheduleFactor(const Schedule& schedule, int64_t step) {
  const auto ratio = [](int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(b); };
  if (step < schedule.warmup_steps) return ratio(step + 1, schedule.warmup_steps);
  switch (schedule.kind) {
    case Schedule::Kind::kConstant:
      break;
    case Schedule::Kind::kCosine: {
      const int64_t begin = schedule.origin + schedule.warmup_steps;
      const double done = std::clamp(ratio(step - begin, std::max<int64_t>(schedule.total_steps - begin, 1)), 0.0, 1.0);
      return 0.5 * (1 + std::cos(std::numbers::pi * done));
    }
    case Schedule::Kind::kStep:
      return std::pow(schedule.gamma, static_cast<double>((step - schedule.origin) / schedule.step_size));
  }
  return 1;
}

}  // namespace examples
