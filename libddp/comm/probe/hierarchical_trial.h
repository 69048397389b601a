// SPDX-License-Identifier: Apache-2.0
// Tries the hierarchical backend out on GPUs, as RunProbe does NCCL, before it takes NCCL's place.
#ifndef LIBDDP_COMM_PROBE_HIERARCHICAL_TRIAL_H_
#define LIBDDP_COMM_PROBE_HIERARCHICAL_TRIAL_H_

#include <vector>

#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/gpu/device_group.h"
#include "libddp/comm/probe/probe_nccl.h"
#include "libddp/comm/probe/probe_result.h"

namespace ddp {

// Collective over `group`, a group on GPUs; its time-out is the limit of every operation. `timing`: also the sizes that
// only serve to compare speeds. A rank that fails aborts the group, so that the others end too.
ProbeResult TryGroup(ProcessGroup& group, DeviceRuntime& runtime, bool timing);

// Collective over `control`, which is whole afterwards: makes a group of the same ranks, tries it out, and lets it go.
// `time` takes the place of the options' time-out. The results of all ranks. Errors: those of `control` alone.
absl::StatusOr<std::vector<ProbeResult>> TryHierarchical(ProcessGroup& control, DeviceGroupOptions options,
                                                         const AttemptTime& time, bool timing);

}  // namespace ddp

#endif  // LIBDDP_COMM_PROBE_HIERARCHICAL_TRIAL_H_
