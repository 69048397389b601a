// SPDX-License-Identifier: Apache-2.0
// How far a median, or a ratio of two, can be trusted.
#ifndef BENCH_INTERVAL_H_
#define BENCH_INTERVAL_H_

#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

#include "bench/percentile.h"

namespace bench {

struct Interval {
  double value = 0;  // of the samples themselves
  double low = 0, high = 0;
};

// What `statistic` says of samples 0 to `count` - 1, and the interval in which it lies with 95 % confidence: that of
// the 2.5th to the 97.5th percentile over 2000 draws of `count` samples with repetition. `statistic` takes the numbers
// of the samples. Deterministic. (The percentile bootstrap: B. Efron, "Bootstrap Methods: Another Look at the
// Jackknife", 1979.)
template <typename Statistic>
Interval Bootstrap(size_t count, const Statistic& statistic) {
  constexpr int kDraws = 2000;
  std::vector<size_t> drawn(count);
  for (size_t k = 0; k < count; ++k) drawn[k] = k;
  Interval interval;
  interval.value = statistic(drawn);
  std::mt19937 random(1);
  std::uniform_int_distribution<size_t> any(0, count - 1);
  std::vector<double> values;
  for (int draw = 0; draw < kDraws; ++draw) {
    for (size_t& sample : drawn) sample = any(random);
    values.push_back(statistic(drawn));
  }
  interval.low = Percentile(values, 0.025);
  interval.high = Percentile(values, 0.975);
  return interval;
}

// The median of the samples that were drawn.
inline double MedianOf(const std::vector<double>& samples, const std::vector<size_t>& drawn) {
  std::vector<double> values;
  values.reserve(drawn.size());
  for (const size_t sample : drawn) values.push_back(samples[sample]);
  return Median(std::move(values));
}

}  // namespace bench

#endif  // BENCH_INTERVAL_H_
