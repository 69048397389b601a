// SPDX-License-Identifier: Apache-2.0
// Short messages between the ranks, so that either all of them continue or all of them stop.
#ifndef EXAMPLES_TRAIN_AGREEMENT_H_
#define EXAMPLES_TRAIN_AGREEMENT_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"

namespace examples {

// Marks an error that is the same on all ranks, so that only one rank prints it. The functions below mark the errors
// that they return, if this is so.
absl::Status Agreed(absl::Status error);
bool IsAgreed(const absl::Status& error);

// Returns the shortest text that reads back as exactly `value`, for texts that ranks compare.
std::string ExactText(double value);

// Collective, like all functions below. Returns OK if `mine` is OK on all ranks. Otherwise it returns the error of the
// lowest-numbered rank that has one, on all ranks. The error names this rank, unless all ranks have the same error.
absl::Status AgreeOn(ddp::ProcessGroup& group, const absl::Status& mine);

// Returns FailedPrecondition on all ranks if `mine`, a list with one item per line, is not equal on all of them. The
// error names the first line that differs and both ranks: "rank 1 has --batch=64, rank 0 has --batch=32; <remedy>".
absl::Status RequireSame(ddp::ProcessGroup& group, absl::string_view mine, absl::string_view remedy);

// Runs `what` and returns its error. An exception from a device, or from a failed allocation, becomes an error. Unless
// the error is the same on all ranks, it aborts the group. So no peer waits for this rank, and no operation still uses
// memory that the caller frees afterwards.
absl::Status EndTogether(ddp::ProcessGroup& group, absl::FunctionRef<absl::Status()> what);

// Shares one number per rank in each step of the training loop, so that all ranks learn in the same step what only one
// of them knew. It is reduced together with the gradients, so it adds no further wait.
//
//   notice.Begin(mine);                        // before the backward pass
//   ...                                        // reduce the gradients
//   absl::StatusOr<int> all = notice.End();    // the largest number of all ranks
class StepNotice {
 public:
  static absl::StatusOr<StepNotice> Create(ddp::ProcessGroup& group);
  StepNotice(StepNotice&&) = default;
  StepNotice& operator=(StepNotice&&) = default;
  ~StepNotice();  // between Begin and End it aborts the group, which may still use the memory

  absl::Status Begin(int32_t mine);
  absl::StatusOr<int32_t> End();

 private:
  StepNotice(ddp::ProcessGroup& group, ddp::Allocation memory) : group_(&group), memory_(std::move(memory)) {}

  ddp::ProcessGroup* group_;
  ddp::Allocation memory_;
  ddp::Work work_;
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_AGREEMENT_H_
