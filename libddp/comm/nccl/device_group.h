// Process groups whose memory is a GPU's: the nccl backend, and local for a world of one.
#ifndef LIBDDP_COMM_NCCL_DEVICE_GROUP_H_
#define LIBDDP_COMM_NCCL_DEVICE_GROUP_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/base/progress_thread.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

struct DeviceGroupOptions {
  Device device;  // this rank's; a GPU
  absl::Duration timeout;
  absl::Duration abort_grace = absl::Seconds(10);  // see DeviceEngineOptions
  absl::Duration stall_warning;                    // zero: none
  ContextObserver* observer = nullptr;             // outlives the group; may be null
  ProgressThread* progress = nullptr;
  DeviceRuntime* runtime = &Devices();
  std::string host = HostId();   // equal on the ranks of one host
  std::optional<nccl::Api> api;  // unset: loaded (see nccl::Load)
};

// Collective over `control`, which has the same ranks, works on CPU memory, and carries what goes before NCCL can and
// what NCCL cannot: the unique id, agreements, and operations on CPU memory. FailedPrecondition if a rank has no such
// GPU, no NCCL or one that is too old, if ranks have different versions of it, or two of them the same GPU; then on all
// ranks.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateNcclGroup(std::unique_ptr<ProcessGroup> control,
                                                              const DeviceGroupOptions& options);

// The same without NCCL for a world of one.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateLocalDeviceGroup(std::unique_ptr<ProcessGroup> control,
                                                                     const DeviceGroupOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_NCCL_DEVICE_GROUP_H_
