// SPDX-License-Identifier: Apache-2.0
// A call as the kernels of the staged protocol take it.
#ifndef LIBDDP_COMM_RING_STAGED_CALL_H_
#define LIBDDP_COMM_RING_STAGED_CALL_H_

#include "absl/status/status.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/gpu/device_moves.h"
#include "libddp/device/device_runtime.h"
#include "libddp/device/staged_protocol.h"

namespace ddp {

// A call's element sizes, count and arithmetic.
staged::Collective CollectiveOf(const CheckedCall& call);

// The sum of such arrays, in place: its element sizes, count, arithmetic and sides.
staged::Collective SumInPlace(const Buffer& array);

// One side of an operation. Where it has too many ranges for a kernel these are copied into one first, or the result is
// copied out of it at the end.
class CallSide {
 public:
  CallSide(DeviceRuntime& runtime, Buffers buffers, void* stream)
      : runtime_(runtime), buffers_(buffers), stream_(stream), whole_(runtime, stream) {}

  absl::Status Fill(bool with_data, staged::RangeTable* table);
  absl::Status StoreResult();

 private:
  DeviceRuntime& runtime_;
  const Buffers buffers_;
  void* const stream_;
  StreamScratch whole_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_RING_STAGED_CALL_H_
