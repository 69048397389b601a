// SPDX-License-Identifier: Apache-2.0
// A GPU's group of one rank: nothing moves but copies.
#ifndef LIBDDP_COMM_GPU_LOCAL_MOVES_H_
#define LIBDDP_COMM_GPU_LOCAL_MOVES_H_

#include "libddp/comm/gpu/device_moves.h"

namespace ddp {

class LocalMoves final : public DeviceMoves {
 public:
  LocalMoves(DeviceRuntime& runtime, Device device) : runtime_(runtime), device_(device) {}

  absl::string_view backend() const override { return "local"; }
  uint64_t Shape(const CheckedCall&) const override { return 0; }
  absl::Status Enqueue(const CheckedCall& call, void* stream) override;
  absl::Status Send(Buffers, int, void*) override { return NoPeer(); }
  absl::Status Recv(Buffers, int, void*) override { return NoPeer(); }
  absl::Status Barrier(void*) override { return absl::OkStatus(); }
  absl::StatusOr<Allocation> Allocate(size_t bytes) override { return AllocatePlain(runtime_, device_, bytes); }
  absl::Status Adopt(const Allocation&) override { return absl::OkStatus(); }

 private:
  static absl::Status NoPeer() { return absl::InternalError("a message in a world of one"); }

  DeviceRuntime& runtime_;
  const Device device_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_LOCAL_MOVES_H_
