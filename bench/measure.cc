// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "bench/percentile.h"

namespace bench {
namespace {

constexpr double kGroupSeconds = 0.002;
constexpr int kMost = kMaxGroups / 3;  // groups of one contender, of which there are at most three
constexpr int kTurns = 4;              // of each contender

int Clamp(double value, int least, int most) {
  return static_cast<int>(std::max<double>(least, std::min<double>(most, value)));
}

// Seconds of one call, after some calls nobody counts. The same on all ranks.
absl::StatusOr<double> WarmUp(Meeting& meeting, const Contender& contender, int iters) {
  meeting.Barrier();
  int64_t begin = NowNs();
  if (absl::Status s = contender.call(); !s.ok()) return s;
  double seconds = static_cast<double>(meeting.Max(NowNs() - begin)) * 1e-9;
  const int calls = iters > 0 ? iters : Clamp(0.02 / seconds, 2, 200);
  meeting.Barrier();
  begin = NowNs();
  for (int i = 0; i < calls; ++i) {
    if (absl::Status s = contender.call(); !s.ok()) return s;
  }
  return static_cast<double>(meeting.Max(NowNs() - begin)) * 1e-9 / calls;
}

// Calls in a group, and how many groups.
struct Shape {
  int calls;
  int groups;
};

Shape Plan(double seconds, const MeasureOptions& o) {
  Shape shape;
  shape.calls = o.fresh ? 1 : Clamp(kGroupSeconds / seconds, 1, 100);
  if (o.iters > 0) {
    shape.calls = std::min(std::max(shape.calls, o.iters / kMost), o.iters);
    shape.groups = Clamp(o.iters / shape.calls, 1, kMost);
    return shape;
  }
  shape.groups = Clamp(o.budget_s / (shape.calls * seconds), 10, o.fresh ? kMost : 50);
  if (10 * seconds > 4) shape.groups = Clamp(4 / seconds, 3, 10);
  return shape;
}

class Timer {
 public:
  Timer(Meeting& meeting, const Contender& contender, bool fresh)
      : meeting_(meeting), contender_(contender), fresh_(fresh) {}

  absl::Status Group(int index, int calls) {
    if (fresh_) {
      contender_.rewrite();
    } else {
      // The other contender may have had the caches since: bring the data back.
      if (absl::Status s = contender_.call(); !s.ok()) return s;
    }
    meeting_.Barrier();
    const int64_t begin = NowNs();
    for (int i = 0; i < calls; ++i) {
      if (absl::Status s = contender_.call(); !s.ok()) return s;
    }
    const int64_t end = NowNs();
    meeting_.Record(index, begin, end);
    if (fresh_) {
      contender_.verify();
      meeting_.Barrier();
    }
    return absl::OkStatus();
  }

 private:
  Meeting& meeting_;
  const Contender& contender_;
  const bool fresh_;
};

// They take turns, several groups at a time: what lies in the caches after another's turn is not what a program finds
// that calls the same operation over and over. Contender k has the indices k, k + n, k + 2 n ...
absl::StatusOr<Measured> TakeTurns(Meeting& meeting, const std::vector<Contender>& contenders, bool fresh, int groups,
                                   const std::vector<int>& calls) {
  const int n = static_cast<int>(contenders.size());
  const int per_turn = (groups + kTurns - 1) / kTurns;
  for (int begin = 0; begin < groups; begin += per_turn) {
    for (int k = 0; k < n; ++k) {
      Timer timer(meeting, contenders[static_cast<size_t>(k)], fresh);
      for (int g = begin; g < std::min(begin + per_turn, groups); ++g) {
        if (absl::Status s = timer.Group(n * g + k, calls[static_cast<size_t>(k)]); !s.ok()) return s;
      }
    }
  }
  std::vector<std::vector<double>> times(contenders.size());
  const std::vector<double> all = meeting.Durations(n * groups);
  for (size_t i = 0; i < all.size(); ++i) times[i % times.size()].push_back(all[i]);
  Measured measured;
  for (size_t k = 0; k < times.size(); ++k) measured.us.push_back(Median(times[k]) / calls[k] * 1e-3);
  return measured;
}

}  // namespace

absl::StatusOr<Measured> Measure(Meeting& meeting, const std::vector<Contender>& contenders,
                                 const MeasureOptions& options) {
  std::vector<int> calls;
  int groups = 0;
  for (const Contender& contender : contenders) {
    const absl::StatusOr<double> seconds = WarmUp(meeting, contender, options.warmup_iters);
    if (!seconds.ok()) return seconds.status();
    const Shape shape = Plan(*seconds, options);
    if (calls.empty()) groups = shape.groups;
    calls.push_back(shape.calls);
  }

  // A virtual machine's processors may be moved while we look: wait for them to be near each other, and repeat what was
  // disturbed.
  const int64_t give_up = NowNs() + static_cast<int64_t>(options.near_wait_s * 1e9);
  for (;;) {
    const double before = meeting.LinkNs();
    const bool late = options.near_ns <= 0 || meeting.Max(NowNs() - give_up) > 0;
    if (before > options.near_ns && !late) {
      usleep(50000);
      continue;
    }
    absl::StatusOr<Measured> measured = TakeTurns(meeting, contenders, options.fresh, groups, calls);
    if (!measured.ok()) return measured;
    measured->link_ns = std::max(before, meeting.LinkNs());
    if (late || measured->link_ns <= options.near_ns) return measured;
  }
}

}  // namespace bench
