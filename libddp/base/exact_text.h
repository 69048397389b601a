// SPDX-License-Identifier: Apache-2.0
// Numbers as text that ranks compare.
#ifndef LIBDDP_BASE_EXACT_TEXT_H_
#define LIBDDP_BASE_EXACT_TEXT_H_

#include <array>
#include <charconv>
#include <string>

namespace ddp {

// Returns the shortest text that reads back as exactly `value`. absl::StrCat keeps six digits, so the texts of two
// different numbers may be equal.
inline std::string ExactText(double value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

}  // namespace ddp

#endif  // LIBDDP_BASE_EXACT_TEXT_H_
