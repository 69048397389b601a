// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/context_settings.h"

#include <cmath>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "libddp/base/env.h"

namespace ddp {
namespace {

absl::StatusOr<absl::Duration> SecondsOf(std::optional<absl::Duration> given, Env env, absl::Duration otherwise) {
  const std::optional<std::string> text = ReadEnv(env);
  if (given.has_value() || !text.has_value()) return given.value_or(otherwise);
  double seconds = 0;
  // The limit keeps sums of times in range; written so that a NaN fails, too.
  if (!absl::SimpleAtod(*text, &seconds) || !(std::abs(seconds) <= 1e9)) {
    return absl::InvalidArgumentError(
        absl::StrCat(EnvName(env), " is '", *text, "'; it must be a number of seconds, at most 1e9"));
  }
  return absl::Seconds(seconds);
}

}  // namespace

absl::StatusOr<ContextTimes> ReadTimes(const ContextOptions& options) {
  const absl::StatusOr<absl::Duration> timeout = SecondsOf(options.timeout, Env::kTimeout, absl::Minutes(10));
  if (!timeout.ok()) return timeout.status();
  if (*timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the time-out (DDP_TIMEOUT) must be above 0 s, not ", absl::FormatDuration(*timeout)));
  }
  const absl::StatusOr<absl::Duration> stall = SecondsOf(options.stall_warning, Env::kStallWarning, absl::Seconds(30));
  if (!stall.ok()) return stall.status();
  if (*stall < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the stall warning (DDP_STALL_WARNING) must be 0 s (never) or more, not ", absl::FormatDuration(*stall)));
  }
  return ContextTimes{*timeout, *stall};
}

absl::StatusOr<std::string> ReadBackend(const ContextOptions& options) {
  const std::string name = options.backend.value_or(ReadEnv(Env::kBackend).value_or("auto"));
  for (const char* known : {"auto", "nccl", "hierarchical", "local"}) {
    if (name == known) return name;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the backend (DDP_BACKEND) must be auto, nccl, hierarchical or local, not '", name, "'"));
}

}  // namespace ddp
