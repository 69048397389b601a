// SPDX-License-Identifier: Apache-2.0
// Process groups whose operations are NCCL's.
#ifndef LIBDDP_COMM_NCCL_NCCL_GROUP_H_
#define LIBDDP_COMM_NCCL_NCCL_GROUP_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/gpu/device_group.h"
#include "libddp/comm/nccl/api.h"

namespace ddp {

struct NcclGroupOptions : DeviceGroupOptions {
  std::optional<nccl::Api> api;  // unset: loaded (see nccl::Load)
  nccl::Comm* given = nullptr;   // see ContextOptions::nccl_comm
  // Registers no memory where NCCL could not abort sums on it: then the GPU comes free after every failure.
  bool always_abortable = false;
  // Of connecting the ranks. Unset: the time-out.
  std::optional<absl::Duration> start_limit = {};
  // Bytes of the sums that connect them, at most. Without GPUs there is nothing to connect, and large ones take long.
  size_t warm_up_limit = SIZE_MAX;
};

// What NCCL needs of the ranks together. Collective over `control`; FailedPrecondition on all ranks if their versions
// differ, or if two ranks of a host have the same GPU and NCCL was not told that they may.
absl::Status CheckNcclRanks(ProcessGroup& control, const std::string& version, const std::string& gpu,
                            const std::string& host);

// Collective over `control`, as CreateDeviceGroup; it also carries what goes before NCCL can: the unique id.
// FailedPrecondition if a rank has no such GPU, no NCCL or one that is too old, if ranks have different versions of it,
// or two of them the same GPU; then on all ranks.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateNcclGroup(std::unique_ptr<ProcessGroup> control,
                                                              const NcclGroupOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_NCCL_NCCL_GROUP_H_
