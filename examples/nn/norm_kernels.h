// SPDX-License-Identifier: Apache-2.0
// Passes of batch normalisation on the CPU, for statistics that oneDNN does not compute: those of several ranks.
#ifndef EXAMPLES_NN_NORM_KERNELS_H_
#define EXAMPLES_NN_NORM_KERNELS_H_

#include <cstddef>

namespace nn {

// Native images: [images][blocks][pixels][block], with blocks * block channels, some of which may be padding. Arrays
// with a number for each channel have that many.
struct BlockedImages {
  size_t images, blocks, pixels, block;

  size_t channels() const { return blocks * block; }
};

// Mean and (biased) variance of each channel's values.
void BatchMoments(const BlockedImages& images, const float* x, double* mean, double* variance);

// y = max(0, (x - mean) * rstd * weight + bias), per channel; the max(0, .) is optional. NaN stays NaN.
struct NormCoefficients {
  const float *mean, *rstd, *weight, *bias;
  bool relu;
};
void NormForward(const BlockedImages& images, const float* x, const NormCoefficients& norm, float* y);

// Below, g is the gradient dy of y, 0 where the max(0, .) has cut y off.
//
// sums[0][c] = the sum of g; sums[1][c] = the sum of g * (x - mean) * rstd.
void NormGradSums(const BlockedImages& images, const float* x, const float* dy, const NormCoefficients& norm,
                  double* sums);
// dx = rstd * weight * (g - means[0][c] - (x - mean) * rstd * means[1][c]). dx may be dy.
void NormBackward(const BlockedImages& images, const float* x, const float* dy, const NormCoefficients& norm,
                  const float* means, float* dx);

}  // namespace nn

#endif  // EXAMPLES_NN_NORM_KERNELS_H_
