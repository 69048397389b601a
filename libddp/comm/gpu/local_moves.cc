// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/local_moves.h"

namespace ddp {

// The reduction of one contribution is that contribution.
absl::Status LocalMoves::Enqueue(const CheckedCall& call, void* stream) {
  if (call.reduce == nullptr) return CopyPieces(runtime_, call.in, call.out, stream);
  const CpuReduce::Scales& scales = call.kernel.scales();
  const double scale = scales.pre64 * scales.post64;
  const bool nothing = scale == 1 && !scales.check && call.key.in == call.key.out;
  if (nothing) return CopyPieces(runtime_, call.in, call.out, stream);
  return runtime_.Run({call.key.in, call.key.out, scale, call.reduce->nonfinite}, PairPieces(call.in, call.out),
                      stream);
}

}  // namespace ddp
