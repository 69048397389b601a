// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/staged_calibration.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/ring/staged_call.h"
#include "libddp/comm/ring/stopwatch.h"
#include "libddp/comm/staged/host_moves.h"

namespace ddp {
namespace {

using staged::Move;

constexpr uint64_t kLargest = 16 << 20;
constexpr uint64_t kSmall = 1 << 20;
constexpr int kRepeats = 3, kRepeatsOfSmall = 10;
constexpr uint64_t kHostSizes[] = {256 << 10, 1 << 20, 4 << 20, kLargest};

// One comparison, at one size, for one limit. Every rank makes the same ones in the same order.
struct Trial {
  uint64_t StagedLimits::*limit;
  Move below, above;
  uint64_t bytes;
};
constexpr size_t kMostTrials = 24;

std::vector<Trial> TrialsFor(int ranks, int blocks, const StagedLimits& limits, bool copies) {
  std::vector<Trial> trials;
  const Move kernels = limits.once == StagedLimits::kNever ? Move::kAllReduceOnce : Move::kAllReduce;
  const Move packets = ranks > 2 ? Move::kAllReducePackets : Move::kAllReducePacketsOnce;
  const uint64_t most = MostInPackets(blocks, sizeof(float));
  for (uint64_t bytes = 16 << 10; bytes <= std::min<uint64_t>(1 << 20, most); bytes *= 2) {
    trials.push_back({&StagedLimits::packets, packets, kernels, bytes});
  }
  if (ranks > 2) {
    for (uint64_t bytes = 8 << 10; bytes <= std::min<uint64_t>(64 << 10, most); bytes *= 2) {
      trials.push_back({&StagedLimits::packets_once, Move::kAllReducePacketsOnce, packets, bytes});
    }
    for (const uint64_t bytes : {128 << 10, 512 << 10}) {
      trials.push_back({&StagedLimits::once, Move::kAllReduceOnce, Move::kAllReduce, bytes});
    }
  }
  if (copies) {
    for (const uint64_t bytes : {2 << 20, 4 << 20, 8 << 20, 16 << 20}) {
      trials.push_back({&StagedLimits::copies, kernels, Move::kAllReduceFetched, bytes});
    }
  }
  return trials;
}

// Times all-reduces of this rank's by one way or another.
class Ways {
 public:
  Ways(ProcessGroup& control, const DeviceGroupOptions& options, StagingRing& ring, StagedCopies* copies, int blocks,
       const StagedLimits& limits)
      : stopwatch(control, options, ring),
        runtime_(*options.runtime),
        ring_(ring),
        copies_(copies),
        blocks_(blocks),
        limits_(limits) {}

  Stopwatch stopwatch;

  absl::StatusOr<double> TimeOf(Move move, uint64_t bytes) {
    return stopwatch.TimeOf(bytes < kSmall ? kRepeatsOfSmall : kRepeats, [&] { return Enqueue(move, bytes); });
  }

 private:
  absl::Status Enqueue(Move move, uint64_t bytes) {
    staged::Collective c = SumInPlace(stopwatch.Array(bytes));
    c.at = ring_.PlaceOf(stopwatch.failed_word());
    c.move = move;
    PlanTiles(blocks_, &c, limits_.tile);
    if (move != Move::kAllReduceFetched) return runtime_.RunStaged(c, stopwatch.stream());
    return copies_->AllReduce(c, ChunkOf(limits_, bytes) / sizeof(float), stopwatch.stream());
  }

  DeviceRuntime& runtime_;
  StagingRing& ring_;
  StagedCopies* const copies_;
  const int blocks_;
  const StagedLimits limits_;
};

// What one rank has measured.
struct Timings {
  std::array<double, kMostTrials> below_us = {}, above_us = {};
};

absl::StatusOr<Timings> Measure(Ways& ways, const std::vector<Trial>& trials) {
  Timings timings;
  for (size_t k = 0; k < trials.size(); ++k) {
    absl::StatusOr<double> below = ways.TimeOf(trials[k].below, trials[k].bytes);
    if (!below.ok()) return below.status();
    absl::StatusOr<double> above = ways.TimeOf(trials[k].above, trials[k].bytes);
    if (!above.ok()) return above.status();
    timings.below_us[k] = *below;
    timings.above_us[k] = *above;
  }
  return timings;
}

// Of each size by the way that the limits choose, and by the host.
absl::StatusOr<Timings> MeasureHost(Ways& ways, HostPipeline& pipeline, absl::Duration timeout, int ranks, int blocks,
                                    const StagedLimits& limits) {
  Timings timings;
  for (size_t k = 0; k < std::size(kHostSizes); ++k) {
    const uint64_t bytes = kHostSizes[k];
    const Buffer array = ways.stopwatch.Array(bytes);
    absl::StatusOr<double> below =
        ways.TimeOf(AllReduceMove(limits, ranks, blocks, bytes / sizeof(float), sizeof(float), sizeof(float)), bytes);
    if (!below.ok()) return below.status();
    absl::StatusOr<double> above = ways.stopwatch.TimeOf(bytes < kSmall ? kRepeatsOfSmall : kRepeats, [&] {
      return AllReduceOnHost(pipeline, timeout, {&array, 1}, {&array, 1}, {}, ways.stopwatch.stream());
    });
    if (!above.ok()) return above.status();
    timings.below_us[k] = *below;
    timings.above_us[k] = *above;
  }
  return timings;
}

// The slowest rank's times count.
StagedTiming Slowest(uint64_t bytes, const std::vector<Timings>& ranks, size_t k) {
  StagedTiming timing = {bytes, 0, 0};
  for (const Timings& rank : ranks) {
    timing.below_us = std::max(timing.below_us, rank.below_us[k]);
    timing.above_us = std::max(timing.above_us, rank.above_us[k]);
  }
  return timing;
}

void SetLimits(const std::vector<Trial>& trials, const std::vector<Timings>& ranks, StagedLimits* limits) {
  for (const auto limit :
       {&StagedLimits::packets, &StagedLimits::packets_once, &StagedLimits::once, &StagedLimits::copies}) {
    std::vector<StagedTiming> timings;
    for (size_t k = 0; k < trials.size(); ++k) {
      if (trials[k].limit == limit) timings.push_back(Slowest(trials[k].bytes, ranks, k));
    }
    if (timings.empty()) continue;
    const uint64_t from = FasterFrom(timings);
    const uint64_t up_to = from == StagedLimits::kNever ? timings.back().bytes : from - 1;
    limits->*limit = limit == &StagedLimits::copies ? from : up_to;
  }
}

}  // namespace

uint64_t FasterFrom(absl::Span<const StagedTiming> timings) {
  uint64_t from = StagedLimits::kNever;
  for (auto timing = timings.rbegin(); timing != timings.rend() && timing->above_us < timing->below_us; ++timing) {
    from = timing->bytes;
  }
  return from;
}

absl::Status CalibrateStaged(ProcessGroup& control, const DeviceGroupOptions& options, StagingRing& ring,
                             StagedCopies* copies, int blocks, StagedLimits* limits) {
  const absl::Time begin = absl::Now();
  const DeviceGuard guard(*options.runtime, options.device);
  Ways ways(control, options, ring, copies, blocks, *limits);
  absl::Status ready = guard.status();
  if (ready.ok()) ready = ways.stopwatch.Prepare(kLargest);
  if (absl::Status s = Agree(control, ready); !s.ok()) return s;
  const std::vector<Trial> trials = TrialsFor(control.size(), blocks, *limits, copies != nullptr);
  absl::StatusOr<Timings> mine = Measure(ways, trials);
  if (absl::Status s = Agree(control, mine.status()); !s.ok()) return s;
  absl::StatusOr<std::vector<Timings>> all = Exchange(control, *mine);
  if (!all.ok()) return all.status();
  SetLimits(trials, *all, limits);
  for (size_t k = 0; k < trials.size(); ++k) {
    LogDebug("rank ", control.rank(), ": ", trials[k].bytes,
             " bytes through host memory: ", absl::StrFormat("%.1f", mine->below_us[k]), " us by way ",
             static_cast<int>(trials[k].below), ", ", absl::StrFormat("%.1f", mine->above_us[k]), " us by way ",
             static_cast<int>(trials[k].above));
  }
  LogInfo("rank ", control.rank(), ": all-reduces go by packets up to ", limits->packets, " bytes",
          limits->packets_once < limits->packets ? absl::StrCat(", in two phases above ", limits->packets_once) : "",
          limits->copies == StagedLimits::kNever ? std::string(", and none by copy engines")
                                                 : absl::StrCat(", by copy engines from ", limits->copies, " bytes on"),
          "; measured in ", absl::StrFormat("%.0f", absl::ToDoubleMilliseconds(absl::Now() - begin)), " ms");
  return absl::OkStatus();
}

absl::Status CalibrateHost(ProcessGroup& control, const DeviceGroupOptions& options, StagingRing& ring,
                           StagedCopies* copies, int blocks, const std::shared_ptr<NodeGroups>& groups,
                           const HostStage& stage, StagedLimits* limits) {
  const DeviceGuard guard(*options.runtime, options.device);
  Ways ways(control, options, ring, copies, blocks, *limits);
  absl::Status ready = guard.status();
  if (ready.ok()) ready = ways.stopwatch.Prepare(kLargest);
  absl::StatusOr<HostStage> trial = HostStage::Create(*options.runtime, stage.slots, stage.slots_of_gpu);
  ready.Update(trial.status());
  if (absl::Status s = Agree(control, ready); !s.ok()) return s;
  trial->up = stage.up;
  absl::StatusOr<Timings> mine;
  {
    HostPipeline pipeline(groups, *trial, *options.runtime, ways.stopwatch.failed_word(),
                          [&mine] { return !mine.ok(); });
    mine = MeasureHost(ways, pipeline, options.timeout, control.size(), blocks, *limits);
    if (!mine.ok()) groups->Fail(mine.status());
  }
  if (absl::Status s = Agree(control, mine.status()); !s.ok()) return s;
  absl::StatusOr<std::vector<Timings>> all = Exchange(control, *mine);
  if (!all.ok()) return all.status();
  std::vector<StagedTiming> timings;
  for (size_t k = 0; k < std::size(kHostSizes); ++k) {
    timings.push_back(Slowest(kHostSizes[k], *all, k));
    LogDebug("rank ", control.rank(), ": ", kHostSizes[k], " bytes: the GPUs reduce in ",
             absl::StrFormat("%.1f", timings[k].below_us), " us, the processors in ",
             absl::StrFormat("%.1f", timings[k].above_us), " us");
  }
  limits->host = FasterFrom(timings);
  LogInfo("rank ", control.rank(), ": ",
          limits->host == StagedLimits::kNever
              ? std::string("the GPUs reduce by themselves, which is faster than by the processors")
              : absl::StrCat("the processors reduce from ", limits->host, " bytes on"));
  return absl::OkStatus();
}

}  // namespace ddp
