// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/step_note.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

const char* What(const StepNote& note) {
  if (note.kind == StepNote::kThrough) return "is through";
  return note.kind == StepNote::kForward ? "begins a forward pass" : "begins a reduced step";
}

absl::Status Consistent(absl::Span<const StepNote> notes, bool weighted) {
  size_t first = notes.size();  // the first rank that has inputs
  for (size_t r = 0; r < notes.size(); ++r) {
    const StepNote &zero = notes[0], &note = notes[r];
    if (note.joined != zero.joined || note.divide_by_active != zero.divide_by_active ||
        note.throw_on_early != zero.throw_on_early || note.scaled != zero.scaled) {
      const auto describe = [](const StepNote& n) {
        return n.joined == 0 ? std::string("is outside of a Join")
                             : absl::StrCat("is in a Join with divide_by_active=", n.divide_by_active,
                                            " throw_on_early=", n.throw_on_early, n.scaled != 0 ? " with" : " without",
                                            " a scaler");
      };
      return absl::FailedPreconditionError(absl::StrCat("rank 0 ", describe(zero), ", rank ", r, " ", describe(note),
                                                        "; give JoinOptions alike on all ranks"));
    }
    if (weighted && !(note.weight >= 0 && std::isfinite(note.weight))) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", r, ": SetWeight(", note.weight, "): a weight is finite and not negative"));
    }
    if (note.kind == StepNote::kThrough) continue;
    first = std::min(first, r);
    if (note.kind != notes[first].kind) {
      return absl::FailedPreconditionError(absl::StrCat("rank ", first, " ", What(notes[first]), ", but rank ", r, " ",
                                                        What(note), "; all ranks take the same steps"));
    }
  }
  return absl::OkStatus();
}

// Whose model all take now: the result, or one that is older but whole. -1: nothing has begun yet.
absl::StatusOr<int> Giver(absl::Span<const StepNote> notes) {
  const auto first = [&](StepNote::Result result) {
    return std::find_if(notes.begin(), notes.end(), [=](const StepNote& note) { return note.result == result; }) -
           notes.begin();
  };
  const auto none = static_cast<std::ptrdiff_t>(notes.size());
  if (first(StepNote::kWhole) < none) return static_cast<int>(first(StepNote::kWhole));
  if (first(StepNote::kPart) == none) return -1;
  if (first(StepNote::kNone) < none) return static_cast<int>(first(StepNote::kNone));
  return absl::DataLossError(
      "no rank has a whole model any more: each was receiving that of the Join when a group failed; start from a "
      "checkpoint");
}

}  // namespace

absl::StatusOr<Meeting> ReadNotes(absl::Span<const StepNote> notes, int rank, ReduceOp op, bool weighted) {
  if (absl::Status s = Consistent(notes, weighted); !s.ok()) return s;
  Meeting meeting;
  double largest = 0;
  for (size_t r = 0; r < notes.size(); ++r) {
    if (notes[r].kind == StepNote::kThrough) continue;
    if (meeting.active++ == 0) meeting.first_active = static_cast<int>(r);
    meeting.last_active = static_cast<int>(r);
    meeting.kind = static_cast<StepNote::Kind>(notes[r].kind);
    largest = std::max(largest, notes[r].weight);
  }
  if (meeting.active == 0) {
    meeting.kind = StepNote::kThrough;
    const absl::StatusOr<int> giver = Giver(notes);
    if (!giver.ok()) return giver.status();
    meeting.giver = *giver;
    return meeting;
  }
  if (notes[0].throw_on_early != 0 && meeting.active < static_cast<int>(notes.size())) {
    const auto* through =
        std::find_if(notes.begin(), notes.end(), [](const StepNote& note) { return note.kind == StepNote::kThrough; });
    return absl::OutOfRangeError(absl::StrCat(
        "rank ", through - notes.begin(), " has no more inputs, and JoinOptions::throw_on_early ends the training"));
  }
  if (meeting.kind != StepNote::kStep) return meeting;
  if (weighted && largest == 0) {
    return absl::FailedPreconditionError("the weight of every rank is 0; SetWeight needs one above 0 on some rank");
  }
  // For a mean, weights count relative to the largest: then nothing grows by them, and equal ones cost nothing.
  const bool mean = op == ReduceOp::kAvg;
  const auto factor = [&](const StepNote& note) {
    if (note.kind == StepNote::kThrough) return 0.0;
    return !weighted ? 1.0 : mean ? note.weight / largest : note.weight;
  };
  double sum = 0;
  for (const StepNote& note : notes) sum += factor(note);
  const double mine = factor(notes[static_cast<size_t>(rank)]);
  meeting.local = notes[static_cast<size_t>(rank)].kind == StepNote::kThrough ? 1 : mine;
  if (mean) meeting.divisor = weighted || notes[0].divide_by_active != 0 ? sum : static_cast<double>(notes.size());
  // Reduced like the contributions, all shares give 1: (sum of shares) / divisor.
  meeting.share = mine * meeting.divisor / sum;
  return meeting;
}

}  // namespace ddp
