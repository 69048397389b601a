// SPDX-License-Identifier: Apache-2.0
// Process groups whose memory is a GPU's. A backend supplies what is enqueued (DeviceMoves); the rest is the same for
// all.
#ifndef LIBDDP_COMM_GPU_DEVICE_GROUP_H_
#define LIBDDP_COMM_GPU_DEVICE_GROUP_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/base/progress_thread.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/gpu/device_moves.h"
#include "libddp/comm/gpu/peer_limits.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/health/peer_board.h"
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
  std::string host = HostId();     // equal on the ranks of one host
  std::string staged_limits = {};  // as DDP_STAGED_LIMITS, whose place it takes; empty: that variable
  PeerLimits peer_copies = {};     // never, unless it is set
};

// What a backend brings to its groups.
struct DeviceBackend {
  std::shared_ptr<DeviceTransport> transport;  // see DeviceEngineOptions; null in a world of one
  std::shared_ptr<PeerBoard> board;            // the same
  // The moves of a group over `control`; both arguments outlive them.
  std::function<std::unique_ptr<DeviceMoves>(InternalGroup& control, const DeviceEngine& engine)> make_moves;
  // Makes a group of fewer ranks over their `control`: for Split.
  std::function<absl::StatusOr<std::unique_ptr<ProcessGroup>>(std::unique_ptr<ProcessGroup> control,
                                                              const DeviceGroupOptions& options)>
      split;
};

// Collective over `over_cpu`, which has the same ranks, works on CPU memory, and carries what the backend cannot:
// agreements, and operations on CPU memory. If a rank fails, all do.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateDeviceGroup(std::unique_ptr<ProcessGroup> over_cpu,
                                                                const DeviceGroupOptions& options,
                                                                DeviceBackend backend);

// After a failure of a group: waits until its GPU has nothing of it to do any more, see DeviceEngine::AwaitFree. OK for
// groups on CPU memory.
absl::Status AwaitFree(ProcessGroup& group);

// A world of one, where nothing moves but copies.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateLocalDeviceGroup(std::unique_ptr<ProcessGroup> control,
                                                                     const DeviceGroupOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_DEVICE_GROUP_H_
