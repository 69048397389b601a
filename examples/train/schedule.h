// How the learning rate changes while training goes on.
#ifndef EXAMPLES_TRAIN_SCHEDULE_H_
#define EXAMPLES_TRAIN_SCHEDULE_H_

#include <cstdint>

namespace examples {

struct Schedule {
  enum class Kind {
    kConstant,
    kCosine,  // half a cosine wave from 1 down to 0 (Loshchilov and Hutter, "SGDR", 2017, without restarts)
    kStep,    // times `gamma` after every `step_size` steps
  };

  Kind kind = Kind::kConstant;
  // The rate grows linearly over so many first steps, from a share of 1 / warmup_steps up to all of it (Goyal et al.,
  // "Accurate, Large Minibatch SGD", 2017).
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  // kCosine: where it has come down to 0, counted from the first
  int64_t step_size = 1;    // kStep, counted from the first step of all
  double gamma = 0.1;       // kStep
};

// What the learning rate is multiplied by in the step after `step` steps.
double ScheduleFactor(const Schedule& schedule, int64_t step);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_SCHEDULE_H_
