// SPDX-License-Identifier: Apache-2.0
// Process groups on GPU memory whose data goes through host memory: the hierarchical backend on GPUs. It works wherever
// one GPU works.
#ifndef LIBDDP_COMM_STAGED_STAGED_GROUP_H_
#define LIBDDP_COMM_STAGED_STAGED_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/gpu/device_group.h"

namespace ddp {

// Collective over `control`, as CreateDeviceGroup; the nodes are those of `control`. Unimplemented if a node has more
// than staged::kMaxRanks ranks; FailedPrecondition if a rank has no such GPU, if one GPU has more ranks of this process
// than its kernels can run at once, or as NodeGroups::Create; ResourceExhausted as StagingRing::Create.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateStagedGroup(std::unique_ptr<ProcessGroup> control,
                                                                const DeviceGroupOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_STAGED_GROUP_H_
