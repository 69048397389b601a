// SPDX-License-Identifier: Apache-2.0
// Several ways to do the same thing, timed in turn.
#ifndef BENCH_MEASURE_H_
#define BENCH_MEASURE_H_

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/meeting.h"

namespace bench {

// One of the contenders. All ranks call each of these together.
struct Contender {
  std::function<absl::Status()> call;  // what is timed
  std::function<void()> rewrite;       // fills this rank's input anew; for --fresh
  std::function<void()> verify;        // looks at the result of a call after `rewrite`; for --fresh
};

struct MeasureOptions {
  bool fresh = false;    // every call works on input that was just rewritten
  int iters = 0;         // timed calls; 0: as many as the budget allows
  int warmup_iters = 0;  // calls before them; 0: 2 to 200, by their time
  double budget_s = 0.2;
  double near_ns = 0;  // the slowest link between ranks 0 and 1 that counts; 0: any
  double near_wait_s = 4;
};

struct Measured {
  std::vector<double> us;  // of each contender
  double link_ns = 0;
};

// Collective over the meeting's ranks. Medians over groups of calls, the groups of the contenders in turn. A group is
// as many calls as last about 2 ms, back to back; in fresh mode one call, before which every rank rewrites its input.
// Its time runs from the first rank's begin to the last rank's end.
absl::StatusOr<Measured> Measure(Meeting& meeting, const std::vector<Contender>& contenders,
                                 const MeasureOptions& options);

}  // namespace bench

#endif  // BENCH_MEASURE_H_
