// SPDX-License-Identifier: Apache-2.0
// What is behind the library that faulty_nccl.cc makes.
#ifndef TESTS_SUPPORT_FAULTY_NCCL_H_
#define TESTS_SUPPORT_FAULTY_NCCL_H_

#include "libddp/comm/nccl/api.h"

namespace ddp::nccl {

// What the library hands its calls on to, and what it does to streams beside that. A process of simulated GPUs fills in
// the variable faulty_nccl_behind before the first call. Unset, these are a real NCCL's and the CUDA driver's.
struct Behind {
  Api api;
  // Calls `what` in the stream's order; the stream waits for its return.
  void (*Call)(CudaStream stream, void (*what)(void*), void* argument) = nullptr;
  // Overwrites four bytes in the stream's order.
  void (*Spoil)(CudaStream stream, void* data) = nullptr;
  // Makes the stream's next operation take so much longer.
  void (*Delay)(CudaStream stream, int us) = nullptr;
};

}  // namespace ddp::nccl

#endif  // TESTS_SUPPORT_FAULTY_NCCL_H_
