// SPDX-License-Identifier: Apache-2.0
// How fast a device multiplies matrices.
#ifndef EXAMPLES_NN_PRODUCT_RATE_H_
#define EXAMPLES_NN_PRODUCT_RATE_H_

#include <algorithm>
#include <chrono>

#include "absl/functional/function_ref.h"

namespace nn {

// The floating-point operations per second of the fastest of several calls of `product`, which multiplies two matrices
// of `size` by `size` elements and waits for the result.
inline double BestRate(int size, absl::FunctionRef<void()> product) {
  using Seconds = std::chrono::duration<double>;
  constexpr int kLeastCalls = 3;
  constexpr double kLeastSeconds = 0.1;
  product();  // which may compile it
  double best = 1e9, sum = 0;
  for (int call = 0; call < kLeastCalls || sum < kLeastSeconds; ++call) {
    const auto begin = std::chrono::steady_clock::now();
    product();
    const double seconds = Seconds(std::chrono::steady_clock::now() - begin).count();
    best = std::min(best, seconds);
    sum += seconds;
  }
  return 2.0 * size * size * size / best;
}

}  // namespace nn

#endif  // EXAMPLES_NN_PRODUCT_RATE_H_
