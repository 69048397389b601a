// SPDX-License-Identifier: Apache-2.0
// Mean and variance of what several ranks have together.
#ifndef EXAMPLES_NN_MOMENTS_H_
#define EXAMPLES_NN_MOMENTS_H_

#include <cstddef>

#include "examples/nn/host_device.h"

namespace nn {

// What a rank tells the others about its values of each channel: the means, the (biased) variances, and how many values
// a channel has.
NN_HOST_DEVICE inline size_t MomentFloats(size_t channels) { return 2 * channels + 1; }

struct Moments {
  double mean;
  double variance;  // biased
  double count;
};

// Of one channel, from what all ranks have told in the order of ranks: the same bits on all of them. Sums of squares
// would lose the variance of values that are far from 0, so deviations are added: those of each rank's values from its
// mean, and those of the means from the mean of all (Chan, Golub and LeVeque, 1979).
NN_HOST_DEVICE inline Moments MergeMoments(const float* told, size_t ranks, size_t channels, size_t channel) {
  const size_t floats = MomentFloats(channels);
  const double origin = told[channel];
  double count = 0, shift = 0, squares = 0;
  for (size_t r = 0; r < ranks; ++r) {
    const float* const from = told + r * floats;
    const double n = from[2 * channels];
    count += n;
    shift += n * (from[channel] - origin);
  }
  shift /= count;
  for (size_t r = 0; r < ranks; ++r) {
    const float* const from = told + r * floats;
    const double apart = from[channel] - origin - shift;
    squares += static_cast<double>(from[2 * channels]) * (from[channels + channel] + apart * apart);
  }
  return {origin + shift, squares / count, count};
}

}  // namespace nn

#endif  // EXAMPLES_NN_MOMENTS_H_
