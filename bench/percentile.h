// SPDX-License-Identifier: Apache-2.0
// What is told of many measured times.
#ifndef BENCH_PERCENTILE_H_
#define BENCH_PERCENTILE_H_

#include <algorithm>
#include <cstddef>
#include <vector>

namespace bench {

// The value below which this share, 0 to 1, of `values` (at least one) lies: the largest one if there is none.
inline double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double at = share * static_cast<double>(values.size());
  return values[std::min(values.size() - 1, static_cast<size_t>(at))];
}

// The median of `values` (at least one).
inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

}  // namespace bench

#endif  // BENCH_PERCENTILE_H_
