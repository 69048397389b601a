// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/statistics.h"

#include <algorithm>
#include <utility>

namespace ddp {

void Statistics::Record(std::vector<BucketTimes> buckets, int64_t exposed_ns) {
  int64_t communication = 0, covered = 0;  // covered: up to where the union of the intervals has been counted
  for (const BucketTimes& t : buckets) {
    communication += std::max<int64_t>(0, t.done_ns - std::max(t.launched_ns, covered));
    covered = std::max(covered, t.done_ns);
  }
  statistics_.buckets = std::move(buckets);
  statistics_.exposed_ns = std::min(exposed_ns, communication);
  statistics_.communication_ns = communication;
  exposed_sum_ns_ += statistics_.exposed_ns;
  communication_sum_ns_ += communication;
}

DdpStatistics Statistics::Get() const {
  DdpStatistics s = statistics_;
  if (communication_sum_ns_ > 0) {
    s.overlap = 1 - static_cast<double>(exposed_sum_ns_) / static_cast<double>(communication_sum_ns_);
  }
  return s;
}

}  // namespace ddp
