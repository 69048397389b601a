// Short messages between the ranks outside the training loop, so that all of them go on, or all of them stop.
#ifndef EXAMPLES_TRAIN_AGREEMENT_H_
#define EXAMPLES_TRAIN_AGREEMENT_H_

#include <cstdint>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"

namespace examples {

// Marks an error that all ranks have alike, so that one of them speaks for all. What the functions below return is
// marked where it is so.
absl::Status Agreed(absl::Status error);
bool IsAgreed(const absl::Status& error);

// Collective, as all that follows. OK where `mine` is OK on all ranks. Otherwise the same error on all ranks: that of
// the lowest rank that has one, which it names unless all have the same.
absl::Status AgreeOn(ddp::ProcessGroup& group, const absl::Status& mine);

// FailedPrecondition on all ranks where `mine`, one item a line, is not the same on all of them: names the first line
// that differs and both ranks, "rank 1 has --batch=64, rank 0 has --batch=32; <remedy>".
absl::Status RequireSame(ddp::ProcessGroup& group, absl::string_view mine, absl::string_view remedy);

// Runs `what`, and returns its error; an exception of a device's, or for want of memory, becomes one. Unless all ranks
// have it alike, the group is aborted with it: so nobody waits for this rank, and what is at work in memory that the
// caller then frees comes to an end.
absl::Status EndTogether(ddp::ProcessGroup& group, absl::FunctionRef<absl::Status()> what);

// A number that every rank may have something to say by in every step of the training loop. It travels beside the
// gradients, so that ranks wait for each other no more than they do anyway, and all of them learn in the same step what
// one of them alone knew.
//
//   notice.Begin(mine);                        // before the backward pass
//   ...                                        // gradients are reduced
//   absl::StatusOr<int> all = notice.End();    // the largest of all ranks'
class StepNotice {
 public:
  static absl::StatusOr<StepNotice> Create(ddp::ProcessGroup& group);
  StepNotice(StepNotice&&) = default;
  StepNotice& operator=(StepNotice&&) = default;
  ~StepNotice();  // between Begin and End: aborts the group, which may be at work in its memory

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
