// SPDX-License-Identifier: Apache-2.0
// The command line of programs that take a few numbers, or flags of their own.
#ifndef BENCH_ARGUMENTS_H_
#define BENCH_ARGUMENTS_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace bench {

struct Number {
  int64_t* value;  // holds the default
  int64_t least = 1;
  int64_t most = std::numeric_limits<int64_t>::max();
};

// Reads the words of the command line into `numbers`, in order; those that are not given keep their defaults. Returns
// the exit code if the program has to end: 0 after --help, which prints what the program does and its `usage`; 2 after
// a word that is not such a number.
inline std::optional<int> ReadNumbers(int argc, char** argv, const char* what, const char* usage,
                                      const std::vector<Number>& numbers) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view word = argv[i];
    if (word == "--help" || word == "-h") {
      std::printf("%s\n\n%s\n", what, usage);
      return 0;
    }
    const auto at = static_cast<size_t>(i - 1);
    int64_t value = 0;
    if (at >= numbers.size() || !absl::SimpleAtoi(word, &value) || value < numbers[at].least ||
        value > numbers[at].most) {
      std::fprintf(stderr, "unexpected argument '%s'; see --help\n", argv[i]);
      return 2;
    }
    *numbers[at].value = value;
  }
  return std::nullopt;
}

// Reads flags of the form --name=value. set(name, value) returns false if there is no such flag, or it cannot have this
// value. Returns the exit code if the program has to end: 0 after --help, which prints `usage`; 2 after a wrong flag.
inline std::optional<int> ReadFlags(int argc, char** argv, const char* usage,
                                    absl::FunctionRef<bool(absl::string_view name, absl::string_view value)> set) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view word = argv[i];
    if (word == "--help" || word == "-h") {
      std::fputs(usage, stdout);
      return 0;
    }
    const size_t equals = word.find('=');
    if (!absl::ConsumePrefix(&word, "--") || equals == absl::string_view::npos ||
        !set(word.substr(0, equals - 2), word.substr(equals - 1))) {
      std::fprintf(stderr, "unexpected argument '%s'\n%s", argv[i], usage);
      return 2;
    }
  }
  return std::nullopt;
}

}  // namespace bench

#endif  // BENCH_ARGUMENTS_H_
