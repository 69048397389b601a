// SPDX-License-Identifier: Apache-2.0
// Just enough to write JSON.
#ifndef LIBDDP_OBSERVE_JSON_H_
#define LIBDDP_OBSERVE_JSON_H_

#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace ddp {

// `text` as a JSON string, in quotes. What is not ASCII is taken for UTF-8 and left as it is.
inline std::string JsonQuote(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += absl::StrFormat("\\u%04x", c);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace ddp

#endif  // LIBDDP_OBSERVE_JSON_H_
