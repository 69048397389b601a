// SPDX-License-Identifier: Apache-2.0
// Moves of a backend whose large all-reduces go another way.
#ifndef LIBDDP_COMM_GPU_LARGE_SUM_MOVES_H_
#define LIBDDP_COMM_GPU_LARGE_SUM_MOVES_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "libddp/comm/gpu/device_moves.h"

namespace ddp {

// All-reduces of `from` bytes of input and more go by AllReduce, and the rest as by `moves`.
class LargeSumMoves : public DeviceMoves {
 public:
  LargeSumMoves(uint64_t from, std::unique_ptr<DeviceMoves> moves) : from_(from), moves_(std::move(moves)) {}

  absl::string_view backend() const override { return moves_->backend(); }
  absl::Status MayBeCaptured() const override { return moves_->MayBeCaptured(); }
  uint64_t Shape(const CheckedCall& call) const override { return moves_->Shape(call); }
  absl::Status Enqueue(const CheckedCall& call, void* stream) override {
    const bool large = call.key.kind == OperationKey::Kind::kAllReduce && call.count * SizeOf(call.key.in) >= from_;
    return large ? AllReduce(call, stream) : moves_->Enqueue(call, stream);
  }
  absl::Status Send(Buffers buffers, int peer, void* stream) override { return moves_->Send(buffers, peer, stream); }
  absl::Status Recv(Buffers buffers, int peer, void* stream) override { return moves_->Recv(buffers, peer, stream); }
  absl::Status Barrier(void* stream) override { return moves_->Barrier(stream); }
  BlockMoves* block_moves() override { return moves_->block_moves(); }
  absl::StatusOr<Allocation> Allocate(size_t bytes) override { return moves_->Allocate(bytes); }
  absl::Status Adopt(const Allocation& memory) override { return moves_->Adopt(memory); }

 private:
  virtual absl::Status AllReduce(const CheckedCall& call, void* stream) = 0;

  const uint64_t from_;
  const std::unique_ptr<DeviceMoves> moves_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_LARGE_SUM_MOVES_H_
