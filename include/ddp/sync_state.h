// SPDX-License-Identifier: Apache-2.0
// Makes the training state equal again after a failure.
#ifndef DDP_SYNC_STATE_H_
#define DDP_SYNC_STATE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// Makes the state of a training equal on all ranks of a group. Call it after an earlier group has failed, because some
// ranks may have completed the last step while others have not.
//   - step: the number of steps that this rank's optimizer has completed; afterwards, the one that is returned. If the
//     call fails while the state of this rank may be half overwritten, it is INT64_MAX afterwards: pass it like that
//     when you call again in another group. Such a rank only receives
//   - state: the memory that a step changes: parameters, optimizer state, counters. Any dtypes. All ranks pass the same
//     counts in the same order
//
// Returns the lowest `step` of all ranks, which is the last step that all ranks have completed. Before that, it copies
// to every rank the state of the lowest-numbered rank with that `step`.
//
//   absl::StatusOr<int64_t> common = ddp::SyncState(*group, step, state);  // continue with the step after it
//
// State on a GPU: the host must have waited for all work that writes it. It is equal when the call returns.
//
// Collective. Returns the errors of the group's operations. InvalidArgument, on every rank, if `state` of one has no
// memory, or memory that the group cannot use: nothing has changed then. DataLoss, on every rank, if none has the state
// of a step any more: start from a checkpoint.
DDP_EXPORT absl::StatusOr<int64_t> SyncState(ProcessGroup& group, int64_t& step, Buffers state);

}  // namespace ddp

#endif  // DDP_SYNC_STATE_H_
