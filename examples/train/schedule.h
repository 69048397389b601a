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
    kStep,    // multiplied by `gamma` after every `step_size` steps
  };

  Kind kind = Kind::kConstant;
  // The number of steps at the start in which the rate grows linearly from 1 / warmup_steps of its value to all of it
  // (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  // kCosine: the number of steps after which the rate is 0
  int64_t step_size = 1;    // kStep: counted from the first step, warm-up included
  double gamma = 0.1;       // kStep
};

// Returns the factor of the learning rate in the step that follows `step` completed steps.
double ScheduleFactor(const Schedule& schedule, int64_t step);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_SCHEDULE_H_
