// SPDX-License-Identifier: Apache-2.0
// Checks for the body of a rank. They throw, so they work on any thread, where Catch2's assertions do not.
#ifndef TESTS_SUPPORT_CHECK_H_
#define TESTS_SUPPORT_CHECK_H_

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/process_group.h"

namespace ddp::testing {

// Thrown by a failed check; what() begins with file and line.
class CheckFailure : public std::runtime_error {
 public:
  CheckFailure(const char* file, int line, const std::string& text)
      : std::runtime_error(absl::StrCat(file, ":", line, ": ", text)) {}
};

inline absl::Status StatusOf(const absl::Status& status) { return status; }
inline absl::Status StatusOf(const Work& work) { return work.call_status(); }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

inline void CheckStatus(const char* file, int line, const char* expression, const absl::Status& status,
                        absl::StatusCode code, const std::vector<std::string>& parts) {
  const std::string message = absl::AsciiStrToLower(status.message());
  bool good = status.code() == code;
  for (const std::string& part : parts) good = good && absl::StrContains(message, absl::AsciiStrToLower(part));
  if (good) return;
  std::string wanted = absl::StatusCodeToString(code);
  for (const std::string& part : parts) absl::StrAppend(&wanted, " \"", part, "\"");
  throw CheckFailure(file, line, absl::StrCat(expression, " is ", status.ToString(), ", expected ", wanted));
}

template <typename A, typename B>
void CheckEqual(const char* file, int line, const char* expression, const A& a, const B& b) {
  if (!(a == b)) throw CheckFailure(file, line, absl::StrCat(expression, ": ", a, " is not ", b));
}

template <typename T>
T ValueOr(const char* file, int line, const char* expression, absl::StatusOr<T> value) {
  if (!value.ok()) throw CheckFailure(file, line, absl::StrCat(expression, " is ", value.status().ToString()));
  return *std::move(value);
}

}  // namespace ddp::testing

// The text of a failed RANK_CHECK may be given after the condition, as arguments of absl::StrCat.
#define RANK_CHECK(condition, ...)                                                                            \
  do {                                                                                                        \
    if (!(condition))                                                                                         \
      throw ::ddp::testing::CheckFailure(__FILE__, __LINE__,                                                  \
                                         ::absl::StrCat(#condition " is false " __VA_OPT__(, ) __VA_ARGS__)); \
  } while (false)
#define RANK_CHECK_EQ(a, b) ::ddp::testing::CheckEqual(__FILE__, __LINE__, #a " == " #b, a, b)
#define RANK_CHECK_OK(status)                                                                                         \
  ::ddp::testing::CheckStatus(__FILE__, __LINE__, #status, ::ddp::testing::StatusOf(status), ::absl::StatusCode::kOk, \
                              {})
// The status has this code, and its message contains each of the texts that follow (in any case).
#define RANK_CHECK_STATUS(status, code, ...) \
  ::ddp::testing::CheckStatus(__FILE__, __LINE__, #status, ::ddp::testing::StatusOf(status), code, {__VA_ARGS__})
// The value of a StatusOr, which has to be OK.
#define RANK_VALUE(status_or) ::ddp::testing::ValueOr(__FILE__, __LINE__, #status_or, status_or)

#endif  // TESTS_SUPPORT_CHECK_H_
