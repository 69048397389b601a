// Going on from the last step that all ranks have made.
#ifndef DDP_SYNC_STATE_H_
#define DDP_SYNC_STATE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// Makes the state of a training equal on all ranks of a group, after the failure of an earlier group overtook some of
// them before and some of them after the end of a step. `step` is the number of steps that this rank has committed,
// which means that its optimizer has made them; `state` is what a step changes: parameters, optimizer state, counters
// (any dtypes; the same counts in the same order on all ranks). Returns the lowest `step` of all ranks, the last that
// all have committed, after copying to every rank the state of the lowest rank that is at it.
//
//   absl::StatusOr<int64_t> common = ddp::SyncState(*group, step, state);
//   if (common.ok()) step = *common;   // and go on with the next one
//
// Collective. Errors are the group's.
DDP_EXPORT absl::StatusOr<int64_t> SyncState(ProcessGroup& group, int64_t step, Buffers state);

}  // namespace ddp

#endif  // DDP_SYNC_STATE_H_
