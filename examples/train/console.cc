// SPDX-License-Identifier: Apache-2.0
#include "examples/train/console.h"

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace examples {

void Console::Print(absl::string_view text) {
  if (!shown_) return;
  ClearBar();
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void Console::DrawBar(Clock::time_point now, int64_t step, int64_t steps, double loss) {
  constexpr int64_t kWidth = 40;
  const int64_t filled = kWidth * step / steps;
  absl::PrintF("\r\033[K[%s%s] step %d of %d, loss %.4f %s", std::string(static_cast<size_t>(filled), '='),
               std::string(static_cast<size_t>(kWidth - filled), ' '), step, steps, loss, state_);
  std::fflush(stdout);
  drawn_ = true;
  next_draw_ = now + std::chrono::milliseconds(200);
}

void Console::Monitor(Clock::time_point now, absl::string_view state) {
  state_ = std::string(state);
  if (!shown_ || bar_ || state.empty() || now < next_line_) return;
  next_line_ = now + std::chrono::seconds(10);
  Print(absl::StrCat("monitor: ", state, "\n"));
}

void Console::ClearBar() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stdout);
  std::fflush(stdout);
  drawn_ = false;
}

}  // namespace examples
