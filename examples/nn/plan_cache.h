// SPDX-License-Identifier: Apache-2.0
// Remembers from run to run which of several ways was found to be the fastest.
#ifndef EXAMPLES_NN_PLAN_CACHE_H_
#define EXAMPLES_NN_PLAN_CACHE_H_

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace nn {

// A file with a line for each choice. Processes may use one file at the same time: each only appends whole lines, and
// of several choices for one key the first counts. A file that cannot be read or written remembers nothing.
// Thread-safety: one thread at a time.
class PlanCache {
 public:
  // An empty name: nothing is remembered.
  explicit PlanCache(std::string file);

  // `key` says all that the choice depends on, in one line without tabs.
  std::optional<size_t> Find(absl::string_view key) const;
  void Put(absl::string_view key, size_t choice);

 private:
  const std::string file_;
  std::map<std::string, size_t, std::less<>> choices_;
};

// `name` in the folder ddp of XDG_CACHE_HOME, or of .cache in HOME; empty if both are unset.
std::string FileInCache(absl::string_view name);

}  // namespace nn

#endif  // EXAMPLES_NN_PLAN_CACHE_H_
