// SPDX-License-Identifier: Apache-2.0
// Sizes as variables give them.
#ifndef LIBDDP_BASE_SIZE_TEXT_H_
#define LIBDDP_BASE_SIZE_TEXT_H_

#include <cstdint>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

namespace ddp {

// Bytes: a number below 2^32, `K` and `M` behind it for 2^10 and 2^20. Nothing if the text is none.
inline std::optional<uint64_t> ParseSize(absl::string_view text) {
  const int shift = absl::EndsWith(text, "K") ? 10 : absl::EndsWith(text, "M") ? 20 : 0;
  if (shift > 0) text.remove_suffix(1);
  uint32_t number = 0;
  if (!absl::SimpleAtoi(text, &number)) return std::nullopt;
  return static_cast<uint64_t>(number) << shift;
}

}  // namespace ddp

#endif  // LIBDDP_BASE_SIZE_TEXT_H_
