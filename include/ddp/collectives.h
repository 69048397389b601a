// Operations made of those that a ProcessGroup has, and the small exchanges that every program needs.
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

// All of these are collective, with the errors of ProcessGroup's operations, and block until this rank's part is done.
// Buffers are in CPU memory.
//
//   absl::StatusOr<double> loss = ddp::AverageScalar(world, local_loss);
//   absl::StatusOr<std::string> config = ddp::BroadcastBytes(world, ReadConfigOnRank0(), 0);

// As AllReduce, with the result on `root` alone, in `out`. The other ranks need no out; only the dtype of theirs counts
// (in's, if there is none).
DDP_EXPORT absl::Status Reduce(ProcessGroup& group, Buffers in, Buffers out, int root,
                               const ReduceOptions& options = {});

// On `root`, out = the inputs of all ranks, end to end, in rank order: count(out) = size() * count(in). The other ranks
// give no out. In place: root's in lies at its own place in out.
DDP_EXPORT absl::Status Gather(ProcessGroup& group, Buffers in, Buffers out, int root);

// The reverse: part r of root's in, which consists of size() equal parts, goes to the out of rank r. The other ranks
// give no in. In place: root's out lies at its own place in in.
DDP_EXPORT absl::Status Scatter(ProcessGroup& group, Buffers in, Buffers out, int root);

// Root's bytes, however many, on every rank. The others' `bytes` do not matter.
DDP_EXPORT absl::StatusOr<std::string> BroadcastBytes(ProcessGroup& group, absl::string_view bytes, int root);

// Every rank's string, of any length and by rank, on every rank.
DDP_EXPORT absl::StatusOr<std::vector<std::string>> GatherStrings(ProcessGroup& group, absl::string_view mine);

// One number reduced over the ranks, on every rank.
DDP_EXPORT absl::StatusOr<double> AllReduceScalar(ProcessGroup& group, double value, ReduceOp op);
DDP_EXPORT absl::StatusOr<int64_t> AllReduceScalar(ProcessGroup& group, int64_t value, ReduceOp op);
inline absl::StatusOr<double> SumScalar(ProcessGroup& group, double value) {
  return AllReduceScalar(group, value, ReduceOp::kSum);
}
inline absl::StatusOr<double> AverageScalar(ProcessGroup& group, double value) {
  return AllReduceScalar(group, value, ReduceOp::kAvg);
}

}  // namespace ddp

#endif  // DDP_COLLECTIVES_H_
