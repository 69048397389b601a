// SPDX-License-Identifier: Apache-2.0
// Measures where one way of an all-reduce through host memory becomes faster than another on these GPUs.
#ifndef LIBDDP_COMM_STAGED_STAGED_CALIBRATION_H_
#define LIBDDP_COMM_STAGED_STAGED_CALIBRATION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"
#include "libddp/comm/gpu/device_group.h"
#include "libddp/comm/ring/staged_plan.h"
#include "libddp/comm/ring/staging_ring.h"
#include "libddp/comm/staged/host_pipeline.h"
#include "libddp/comm/staged/staged_copies.h"

namespace ddp {

// An all-reduce of `bytes` took so long by each of two ways, `below` meant for smaller arrays and `above` for larger.
struct StagedTiming {
  uint64_t bytes;
  double below_us, above_us;
};

// The size from which on `above` is faster at all sizes that were measured, which ascend; kNever if it is slower at the
// largest.
uint64_t FasterFrom(absl::Span<const StagedTiming> timings);

// Collective over `control`, whose GPUs do nothing else. Measures for a few milliseconds, with all ranks at once, and
// sets *limits, alike on all ranks. `copies` is null if there are none. An error, on every rank, if a rank is gone or
// the group's time-out passes; the ring is aborted then.
absl::Status CalibrateStaged(ProcessGroup& control, const DeviceGroupOptions& options, StagingRing& ring,
                             StagedCopies* copies, int blocks, StagedLimits* limits);

// The same for limits->host: from which size on AllReduceOnHost is faster than what the other limits choose. An error
// ends `groups`, too.
absl::Status CalibrateHost(ProcessGroup& control, const DeviceGroupOptions& options, StagingRing& ring,
                           StagedCopies* copies, int blocks, const std::shared_ptr<NodeGroups>& groups,
                           const HostStage& stage, StagedLimits* limits);

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_STAGED_CALIBRATION_H_
