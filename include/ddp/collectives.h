// SPDX-License-Identifier: Apache-2.0
// Helpers based on the operations of a ProcessGroup: exchanges of small values.
#ifndef DDP_COLLECTIVES_H_
#define DDP_COLLECTIVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// All of these functions are collective, return the errors of ProcessGroup's operations, and block until this rank's
// part is done.
//
//   absl::StatusOr<double> loss = ddp::AverageScalar(world, local_loss);
//   absl::StatusOr<std::string> config = ddp::BroadcastBytes(world, ReadConfigOnRank0(), 0);

// Returns root's `bytes`, of any length, on every rank. The `bytes` of the other ranks are ignored.
DDP_EXPORT absl::StatusOr<std::string> BroadcastBytes(ProcessGroup& group, absl::string_view bytes, int root);

// Returns the strings of all ranks, indexed by rank, on every rank. They may have any length.
DDP_EXPORT absl::StatusOr<std::vector<std::string>> GatherStrings(ProcessGroup& group, absl::string_view mine);

// Reduces one number over all ranks and returns the result on every rank.
DDP_EXPORT absl::StatusOr<double> AllReduceScalar(ProcessGroup& group, double value, ReduceOp op);
// The same for an integer.
DDP_EXPORT absl::StatusOr<int64_t> AllReduceScalar(ProcessGroup& group, int64_t value, ReduceOp op);
// The sum of all ranks' numbers.
inline absl::StatusOr<double> SumScalar(ProcessGroup& group, double value) {
  return AllReduceScalar(group, value, ReduceOp::kSum);
}
// The mean of all ranks' numbers.
inline absl::StatusOr<double> AverageScalar(ProcessGroup& group, double value) {
  return AllReduceScalar(group, value, ReduceOp::kAvg);
}

}  // namespace ddp

#endif  // DDP_COLLECTIVES_H_
