// SPDX-License-Identifier: Apache-2.0
// The output of rank 0 during training: a progress bar on a terminal, lines otherwise.
#ifndef EXAMPLES_TRAIN_CONSOLE_H_
#define EXAMPLES_TRAIN_CONSOLE_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace examples {

class Console {
 public:
  using Clock = std::chrono::steady_clock;

  // `shown`: true on rank 0. If false, all calls do nothing.
  Console(bool shown, bool terminal) : shown_(shown), bar_(shown && terminal) {}
  ~Console() { ClearBar(); }
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // From now on: this rank has become rank 0.
  void Show() { shown_ = true; }

  // Prints text, which must end with a newline, in place of the bar.
  void Print(absl::string_view text);

  // Redraws the bar, at most a few times per second. Calling it in every step costs almost nothing.
  void Step(Clock::time_point now, int64_t step, int64_t steps, double loss) {
    if (bar_ && now >= next_draw_) DrawBar(now, step, steps, loss);
  }

  // Shows the state of the machine beside the bar; without a bar, as a line of its own every 10 seconds.
  void Monitor(Clock::time_point now, absl::string_view state);

 private:
  void DrawBar(Clock::time_point now, int64_t step, int64_t steps, double loss);
  void ClearBar();

  bool shown_;
  bool bar_;
  bool drawn_ = false;
  Clock::time_point next_draw_, next_line_;
  std::string state_;
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_CONSOLE_H_
