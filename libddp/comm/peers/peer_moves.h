// SPDX-License-Identifier: Apache-2.0
// Adds to a backend of GPUs that its large all-reduces within a host go by the copy engines: DDP_PEER_COPIES.
#ifndef LIBDDP_COMM_PEERS_PEER_MOVES_H_
#define LIBDDP_COMM_PEERS_PEER_MOVES_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/gpu/device_group.h"
#include "libddp/comm/peers/peer_copies.h"

namespace ddp {

// Enqueues the sum of float32 over the ranks, in place, by the backend itself.
using SumOfBackend = std::function<absl::Status(const Buffer& array, void* stream)>;

// Collective over `control`. Changes *backend if all ranks are on one host, their GPUs reach each other's memory, sums
// come out right, and, where it is automatic, two ranks take little longer than by `theirs`; else it leaves it alone,
// and the log says why. `theirs` is null if the backend does not use the GPUs' links. Ranks may give different limits:
// the largest `from` counts, and rank 0's other values. An error, on every rank, if a rank is gone or does not end in
// the time-out.
absl::Status AddPeerCopies(ProcessGroup& control, const DeviceGroupOptions& options, const SumOfBackend& theirs,
                           DeviceBackend* backend);

}  // namespace ddp

#endif  // LIBDDP_COMM_PEERS_PEER_MOVES_H_
