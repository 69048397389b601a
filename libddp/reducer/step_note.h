// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other at the beginning of a step, where they may have unequal weights or numbers of steps.
#ifndef LIBDDP_REDUCER_STEP_NOTE_H_
#define LIBDDP_REDUCER_STEP_NOTE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/types.h"

namespace ddp {

// Travels as bytes: no padding.
struct StepNote {
  enum Kind : uint8_t { kForward, kStep, kThrough };  // kThrough: this rank has no more inputs
  // Of the model that all take when a Join ends; a group may have failed meanwhile.
  enum Result : uint8_t { kNone, kWhole, kPart };

  double weight = 1;
  uint8_t kind = kStep;
  uint8_t divide_by_active = 0;
  uint8_t throw_on_early = 0;
  uint8_t joined = 0;      // inside a Join
  uint8_t scaled = 0;      // which keeps an enabled scaler equal
  uint8_t result = kNone;  // what this rank has
  uint8_t reserved[2] = {};
};
static_assert(sizeof(StepNote) == 16);

// What the notes of all ranks amount to.
struct Meeting {
  StepNote::Kind kind = StepNote::kStep;  // kThrough: nobody has inputs
  int active = 0;                         // ranks that have
  int first_active = 0, last_active = 0;  // the lowest and the highest of them
  int giver = -1;                         // nobody has inputs, and some have a part of the result: who gives it
  // The step's result is (sum of local * contribution) / divisor.
  double local = 1, divisor = 1;
  double share = 1;  // see GradBucket::share
};

// `notes` in rank order, of which ours is that of `rank`. FailedPrecondition: ranks do different things, or weights are
// no weights. OutOfRange: a rank is through, and that was to end the others' loops too. DataLoss: all have only a part
// of the result.
absl::StatusOr<Meeting> ReadNotes(absl::Span<const StepNote> notes, int rank, ReduceOp op, bool weighted);

}  // namespace ddp

#endif  // LIBDDP_REDUCER_STEP_NOTE_H_
