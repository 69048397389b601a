// SPDX-License-Identifier: Apache-2.0
// How the learning rate changes during training.
#ifndef EXAMPLES_TRAIN_SCHEDULE_H_
#define EXAMPLES_TRAIN_SCHEDULE_H_

#include <cstdint>

namespace examples {

struct Schedule {
  enum class Kind {
    kConstant,
    kCosine,  // half a cosine wave from 1 down to 0 (Loshchilov and Hutter, "SGDR", 2017, without restarts)
    kStep,    // multiplied by `gamma` after every `step_size` steps from `origin` on
  };

  Kind kind = Kind::kConstant;
  // The number of steps at the start in which the rate grows linearly from 1 / warmup_steps of its value to all of it
  // (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  // kCosine: the number of steps after which the rate is 0
  int64_t step_size = 1;    // kStep: warm-up included
  // The step at which the training would have begun, had all its steps been as large as they are now. Not 0 where the
  // number of samples in a step has changed, so that the rate depends on how much data has been seen.
  int64_t origin = 0;
  double gamma = 0.1;  // kStep
};

// Returns the factor of the learning rate in the step that follows `step` completed steps.
double ScheduleFactor(const Schedule& schedule, int64_t step);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_SCHEDULE_H_
