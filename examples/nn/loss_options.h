// SPDX-License-Identifier: Apache-2.0
// Options of a loss.
#ifndef EXAMPLES_NN_LOSS_OPTIONS_H_
#define EXAMPLES_NN_LOSS_OPTIONS_H_

#include <cstdint>

#include "examples/nn/host_device.h"

namespace nn {

// Where losses go: the n-th, from 0, to losses[n % size]. `calls` counts them where they are computed, so that a GPU
// which replays a graph goes on to the next place. From one address: always there.
struct LossRing {
  LossRing(double* loss) : losses(loss) {}  // NOLINT(google-explicit-constructor)
  LossRing(double* losses_, uint64_t* calls_, uint64_t size_) : losses(losses_), calls(calls_), size(size_) {}

  // By one thread.
  NN_HOST_DEVICE double& Next() const { return calls == nullptr ? *losses : losses[(*calls)++ % size]; }

  double* losses;
  uint64_t* calls = nullptr;  // on the device that computes
  uint64_t size = 1;
};

struct LossOptions {
  // The part of the target (0 to 1) that is taken from the label and spread evenly over all classes. (Szegedy et al.,
  // "Rethinking the Inception Architecture for Computer Vision", 2016; the same as in torch's cross_entropy.)
  float label_smoothing = 0;
  // Factor of the gradient: 1 / k if k batches are accumulated into one.
  float grad_scale = 1;
  // Unless null, another factor of the gradient: a gradient scaler's scale, on the device that computes. It makes small
  // gradients large before they are rounded to 16 bits.
  const float* loss_scale = nullptr;
};

}  // namespace nn

#endif  // EXAMPLES_NN_LOSS_OPTIONS_H_
