// SPDX-License-Identifier: Apache-2.0
// How long the steps of a training communicate.
#ifndef EXAMPLES_TRAIN_COMMUNICATION_TIMES_H_
#define EXAMPLES_TRAIN_COMMUNICATION_TIMES_H_

#include <cstdint>

#include "examples/train/durations.h"

namespace examples {

// What the library reports of steps, without the warm-up unless there is nothing else: first steps try out plans
// between their reductions, and take seconds. Steps are numbered; the first one behind the warm-up is 1.
class CommunicationTimes {
 public:
  // `behind`: the report may be that of a step so many steps ago, as on a GPU, where steps end later. There not every
  // step is asked for.
  explicit CommunicationTimes(int64_t behind) : behind_(behind) {}

  // Whether to ask for the report in this step.
  bool Wants(int64_t step) const {
    const int64_t reported = step - behind_;
    if (behind_ == 0) return true;
    if (reported <= 0) return communication_.sum_ns() == 0;  // until there is a report
    return reported <= 8 || reported % 16 == 1;
  }
  void Add(int64_t step, int64_t exposed_ns, int64_t communication_ns) {
    if (warming_up_ && step > behind_) {
      Restart();
      warming_up_ = false;
    }
    exposed_.Add(exposed_ns);
    communication_.Add(communication_ns);
  }
  // Forgets all, and begins with the warm-up.
  void Restart() {
    warming_up_ = true;
    exposed_.Restart();
    communication_.Restart();
  }

  const Durations& exposed() const { return exposed_; }
  const Durations& communication() const { return communication_; }

 private:
  const int64_t behind_;
  bool warming_up_ = true;
  Durations exposed_{0}, communication_{0};
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_COMMUNICATION_TIMES_H_
