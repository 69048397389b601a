// SPDX-License-Identifier: Apache-2.0
// Groups of GPUs whose backend is chosen by what works.
#ifndef LIBDDP_COMM_AUTO_GROUP_H_
#define LIBDDP_COMM_AUTO_GROUP_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "ddp/context.h"
#include "ddp/process_group.h"
#include "libddp/comm/nccl/nccl_group.h"
#include "libddp/comm/probe/probe_nccl.h"

namespace ddp {

struct AutoGroupOptions : NcclGroupOptions {
  ProbeNcclOptions probe = {};          // what the group's options say, too, is taken from there
  bool nccl_started = nccl::Started();  // then it is too late for NCCL_P2P_DISABLE
};

struct AutoGroup {
  std::unique_ptr<ProcessGroup> group;
  BackendChoice choice;
  std::function<void()> forget = [] {};  // what was remembered of NCCL, should it fail after all
};

// Collective over `control`, a group of the same ranks, at least two, on CPU memory. The same choice on all ranks, as
// BackendChoice describes; NCCL that fails after it has passed its probe gives way, too. Rank 0 logs the choice. May
// set NCCL_P2P_DISABLE. NCCL is used so that it can be aborted at any time. FailedPrecondition, with what failed on
// each way, if no backend works.
absl::StatusOr<AutoGroup> CreateAutoGroup(std::unique_ptr<ProcessGroup> control, const AutoGroupOptions& options);

// What CreateAutoGroup would choose, as far as the probes say, and why.
struct AutoPrediction {
  BackendChoice choice;  // without a backend: none works, as the text says
  ProbeReport report;    // of NCCL
};

// Collective. Makes no group of NCCL's, sets nothing, logs nothing.
absl::StatusOr<AutoPrediction> PredictAutoGroup(std::unique_ptr<ProcessGroup> control, const AutoGroupOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_AUTO_GROUP_H_
