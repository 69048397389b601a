// SPDX-License-Identifier: Apache-2.0
// What a Context takes from its options, else from environment variables.
#ifndef LIBDDP_COMM_CONTEXT_SETTINGS_H_
#define LIBDDP_COMM_CONTEXT_SETTINGS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/context.h"

namespace ddp {

struct ContextTimes {
  absl::Duration timeout, stall_warning;
};

// InvalidArgument where a value is none, or out of range; the message names the variable, and no rank.
absl::StatusOr<ContextTimes> ReadTimes(const ContextOptions& options);

// "auto", "nccl", "hierarchical" or "local"; errors as above.
absl::StatusOr<std::string> ReadBackend(const ContextOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_CONTEXT_SETTINGS_H_
