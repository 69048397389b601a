// SPDX-License-Identifier: Apache-2.0
// How long the steps of a training communicate.
#ifndef EXAMPLES_TRAIN_COMMUNICATION_TIMES_H_
#define EXAMPLES_TRAIN_COMMUNICATION_TIMES_H_

#include <cstdint>
#include <utility>

#include "examples/train/durations.h"

namespace examples {

// What the library reports of steps, without the warm-up unless there is nothing else: first steps try out plans
// between their reductions, and take seconds. Steps are numbered; the first one behind the warm-up is 1.
class CommunicationTimes {
 public:
  // `behind`: 0 on the CPU, where each step has a report. On a GPU a report is there at most so many steps after its
  // step has started, and only some steps have one: until the next it is the same one again.
  explicit CommunicationTimes(int64_t behind) : behind_(behind) {}

  // Whether to ask for the report in this step.
  bool Wants(int64_t step) const {
    const int64_t sure = step - behind_;  // no report of the warm-up is still to come
    return behind_ == 0 || (sure < 0 ? communication_.sum_ns() == 0 : sure <= 8 || sure % 16 == 0);
  }
  void Add(int64_t step, int64_t exposed_ns, int64_t communication_ns) {
    if (behind_ > 0) {
      const std::pair<int64_t, int64_t> report = {exposed_ns, communication_ns};
      const bool is_known = report == last_;
      last_ = report;
      if (is_known || step == behind_) return;
    }
    if (warming_up_ && step > behind_) {
      exposed_.Restart();
      communication_.Restart();
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
  std::pair<int64_t, int64_t> last_;  // report, of a GPU
  Durations exposed_{0}, communication_{0};
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_COMMUNICATION_TIMES_H_
