// SPDX-License-Identifier: Apache-2.0
// What one rank of a GPU's group knows of the others: whether they have failed, are gone or late, and how to say so.
#ifndef LIBDDP_COMM_GPU_DEVICE_PEERS_H_
#define LIBDDP_COMM_GPU_DEVICE_PEERS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "libddp/comm/gpu/device_operation.h"

namespace ddp {

struct DeviceEngineOptions;

// Thread-safe. In a world of one it knows nothing.
class DevicePeers {
 public:
  explicit DevicePeers(const DeviceEngineOptions& options) : options_(options) {}

  // What the group has failed with elsewhere: on this host, or on another.
  absl::Status Failure() const;
  // Whether peers call something else than the operation, for which this rank has waited so long, or are gone.
  absl::Status Check(const DeviceOperation& operation, uint64_t sequence, int64_t waited_ns) const;
  // What operation `sequence` has failed with, where the transport, or the time that is out, says `error` since then:
  // that a peer is gone, or what a peer has failed with, if that explains it, else `error`. Null: not known yet, ask
  // again. Never waits.
  std::optional<absl::Status> Cause(const absl::Status& error, uint64_t sequence, int64_t since_ns) const;
  // The same, waiting for it: for kAnswerNs at most. Not for the progress thread, which answers other hosts' ranks.
  absl::Status Explain(const absl::Status& error, uint64_t sequence) const;

  // DeadlineExceeded, naming who did not come, if the operation has waited too long.
  absl::Status InTime(const DeviceOperation& operation, uint64_t sequence, int64_t waited_ns) const;
  // Of the `begun`th captured sequence of operations.
  absl::Status GraphTimedOut(uint32_t begun, absl::Duration timeout) const;
  // If the operation has waited too long, and nobody else has told.
  void TellStall(const DeviceOperation& operation, uint64_t sequence, int64_t waited_ns) const;

 private:
  absl::Status TimedOut(const DeviceOperation& operation, uint64_t sequence) const;
  // "did not arrive: rank 1", and these ranks; an empty list if all of this host have come.
  std::string Laggards(const DeviceOperation& operation, uint64_t sequence, std::vector<int>* ranks) const;

  const DeviceEngineOptions& options_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_DEVICE_PEERS_H_
