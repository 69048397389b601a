// SPDX-License-Identifier: Apache-2.0
// One operation on GPU memory, for its peers and for errors.
#ifndef LIBDDP_COMM_GPU_DEVICE_OPERATION_H_
#define LIBDDP_COMM_GPU_DEVICE_OPERATION_H_

#include <string>

#include "absl/time/time.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/health/peer_board.h"

namespace ddp {

struct DeviceOperation {
  OperationKey key;
  BoardEntry entry;               // a collective's
  const char* message = nullptr;  // "send" or "recv": then not for all ranks, and so not on the board
  int peer = 0, tag = 0;
  int bucket = -1;
  absl::Duration timeout = absl::InfiniteDuration();

  std::string Describe() const;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_DEVICE_OPERATION_H_
