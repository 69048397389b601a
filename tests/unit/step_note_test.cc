// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/step_note.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

StepNote Note(StepNote::Kind kind, double weight = 1) {
  StepNote note;
  note.kind = kind;
  note.weight = weight;
  return note;
}

Meeting Read(const std::vector<StepNote>& notes, int rank, ReduceOp op, bool weighted) {
  const absl::StatusOr<Meeting> meeting = ReadNotes(notes, rank, op, weighted);
  REQUIRE(meeting.ok());
  return *meeting;
}

void CheckError(const std::vector<StepNote>& notes, absl::StatusCode code, const std::string& part) {
  const absl::Status status = ReadNotes(notes, 0, ReduceOp::kAvg, true).status();
  INFO(status.ToString());
  CHECK(status.code() == code);
  CHECK(absl::StrContains(status.message(), part));
}

constexpr auto kForward = StepNote::kForward, kStep = StepNote::kStep, kThrough = StepNote::kThrough;

TEST_CASE("who is active, and what they do") {
  Meeting m =
      Read({Note(kThrough), Note(kStep), Note(kThrough), Note(kStep), Note(kThrough)}, 1, ReduceOp::kAvg, false);
  CHECK(m.kind == kStep);
  CHECK(m.active == 2);
  CHECK(m.first_active == 1);
  CHECK(m.last_active == 3);
  CHECK(Read({Note(kForward), Note(kThrough)}, 1, ReduceOp::kAvg, false).kind == kForward);
  m = Read({Note(kThrough), Note(kThrough)}, 0, ReduceOp::kAvg, false);
  CHECK(m.kind == kThrough);
  CHECK(m.active == 0);
}

TEST_CASE("means are over all ranks, over the active ones, or over weights") {
  std::vector<StepNote> notes = {Note(kStep, 4), Note(kThrough, 100), Note(kStep, 8), Note(kStep, 2)};
  CHECK(Read(notes, 0, ReduceOp::kAvg, false).divisor == 4);
  CHECK(Read(notes, 0, ReduceOp::kAvg, false).local == 1);
  CHECK(Read(notes, 0, ReduceOp::kAvg, false).share == 4.0 / 3);  // 3 of 4 ranks are active
  CHECK(Read(notes, 1, ReduceOp::kAvg, false).share == 0);
  for (StepNote& note : notes) note.joined = note.divide_by_active = 1;
  CHECK(Read(notes, 0, ReduceOp::kAvg, false).divisor == 3);
  const Meeting weighted = Read(notes, 0, ReduceOp::kAvg, true);
  CHECK(weighted.local == 0.5);  // relative to the largest of those that count
  CHECK(weighted.share == 0.5);
  CHECK(weighted.divisor == 0.5 + 1 + 0.25);
  CHECK(Read(notes, 2, ReduceOp::kAvg, true).local == 1);
  CHECK(Read(notes, 1, ReduceOp::kAvg, true).local == 1);  // zeros need no scaling
  const Meeting sum = Read(notes, 0, ReduceOp::kSum, true);
  CHECK(sum.local == 4);
  CHECK(sum.divisor == 1);
  CHECK(sum.share == 4.0 / 14);
}

TEST_CASE("who gives the result of a Join after a failure") {
  std::vector<StepNote> notes(3, Note(kThrough));
  const auto giver = [&] { return Read(notes, 0, ReduceOp::kAvg, false).giver; };
  CHECK(giver() == -1);
  notes[0].result = notes[2].result = StepNote::kPart;
  CHECK(giver() == 1);
  notes[2].result = StepNote::kWhole;
  CHECK(giver() == 2);
  notes[1].result = notes[2].result = StepNote::kPart;
  CheckError(notes, absl::StatusCode::kDataLoss, "start from a checkpoint");
}

TEST_CASE("what cannot go on") {
  CheckError({Note(kStep), Note(kForward)}, absl::StatusCode::kFailedPrecondition, "rank 1 begins a forward pass");
  CheckError({Note(kStep), Note(kStep, -1)}, absl::StatusCode::kFailedPrecondition, "rank 1: SetWeight(-1)");
  CheckError({Note(kStep, NAN)}, absl::StatusCode::kFailedPrecondition, "SetWeight(nan)");
  CheckError({Note(kStep, 0), Note(kThrough, 1)}, absl::StatusCode::kFailedPrecondition, "every rank is 0");
  std::vector<StepNote> notes = {Note(kStep), Note(kStep), Note(kThrough)};
  notes[1].joined = 1;
  CheckError(notes, absl::StatusCode::kFailedPrecondition, "rank 0 is outside of a Join");
  for (StepNote& note : notes) note.joined = note.throw_on_early = 1;
  CheckError(notes, absl::StatusCode::kOutOfRange, "rank 2 has no more inputs");
  notes[1].scaled = 1;
  CheckError(notes, absl::StatusCode::kFailedPrecondition, "without a scaler, rank 1 is in a Join");
  CheckError(notes, absl::StatusCode::kFailedPrecondition, "throw_on_early=1 with a scaler");
  notes[1].scaled = 0;
  notes[2].kind = kStep;
  CHECK(ReadNotes(notes, 0, ReduceOp::kAvg, true).ok());
}

}  // namespace
}  // namespace ddp
