// SPDX-License-Identifier: Apache-2.0
// How an operation of libddp that is polled ends.
#ifndef DDP_PYTHON_SRC_OUTCOME_H_
#define DDP_PYTHON_SRC_OUTCOME_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"

namespace ddp_torch {

// Waits until `deadline`. The outcome, or nothing if the operation has not ended. What Work::Wait returned by then is
// no outcome: it may be DeadlineExceeded, and the operation ends a moment later.
inline std::optional<absl::Status> OutcomeBy(ddp::Work& work, absl::Time deadline) {
  if (!work.Done() && absl::Now() < deadline) work.Wait(deadline).IgnoreError();
  if (!work.Done()) return std::nullopt;
  return work.Wait();
}

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_OUTCOME_H_
