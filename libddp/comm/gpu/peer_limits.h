// SPDX-License-Identifier: Apache-2.0
// Which all-reduces go by the copy engines of GPUs that reach each other: DDP_PEER_COPIES.
#ifndef LIBDDP_COMM_GPU_PEER_LIMITS_H_
#define LIBDDP_COMM_GPU_PEER_LIMITS_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace ddp {

struct PeerLimits {
  static constexpr uint64_t kNever = UINT64_MAX;

  uint64_t from = kNever;     // bytes from which on an all-reduce goes so
  uint64_t chunk = 64 << 20;  // bytes of a chunk, at most
  // Only over NCCL, for two ranks, and where this is about as fast as what it replaces.
  bool automatic = true;

  // DDP_PEER_COPIES. InvalidArgument if it cannot be understood.
  static absl::StatusOr<PeerLimits> FromEnv();
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_PEER_LIMITS_H_
