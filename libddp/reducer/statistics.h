// SPDX-License-Identifier: Apache-2.0
// What a model says about its steps.
#ifndef LIBDDP_REDUCER_STATISTICS_H_
#define LIBDDP_REDUCER_STATISTICS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/distributed_data_parallel.h"

namespace ddp {

// Of each bucket of a plan, the names of its parameters.
using BucketNames = std::vector<std::vector<std::string>>;

// What was measured of one reduced step.
struct MeasuredStep {
  int64_t step = 0;      // 1, 2, ...
  int64_t begin_ns = 0;  // when it began, on the host's clock
  int64_t exposed_ns = 0;
  std::vector<BucketTimes> buckets;
  std::shared_ptr<const BucketNames> names;  // by now the model may have another plan
};

// Not thread-safe. Costs some nanoseconds for each bucket.
class Statistics {
 public:
  void CountStep() { ++statistics_.steps; }
  void SetSteps(int64_t steps) { statistics_.steps = steps; }
  // What was measured of a reduced step, of which this rank waited exposed_ns in FinishBackward.
  void Record(std::vector<BucketTimes> buckets, int64_t exposed_ns);
  void CountPlan() { ++statistics_.plans; }

  int64_t steps() const { return statistics_.steps; }
  DdpStatistics Get() const;

 private:
  DdpStatistics statistics_;
  int64_t exposed_sum_ns_ = 0, communication_sum_ns_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_STATISTICS_H_
