// SPDX-License-Identifier: Apache-2.0
// Calls that may never return, under a deadline.
#ifndef LIBDDP_COMM_NCCL_RUN_UNDER_H_
#define LIBDDP_COMM_NCCL_RUN_UNDER_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ddp {

// Runs `work` on a thread of its own. Returns its result, or what `interrupted` says (asked about once a millisecond),
// or DeadlineExceeded with the text `what`. In the last two cases the thread goes on alone, so `work` must own what it
// touches.
absl::Status RunUnder(absl::Time deadline, const std::function<absl::Status()>& interrupted, const std::string& what,
                      std::function<absl::Status()> work);

}  // namespace ddp

#endif  // LIBDDP_COMM_NCCL_RUN_UNDER_H_
