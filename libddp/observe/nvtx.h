// SPDX-License-Identifier: Apache-2.0
// Ranges for NVIDIA's tools (Nsight Systems).
#ifndef LIBDDP_OBSERVE_NVTX_H_
#define LIBDDP_OBSERVE_NVTX_H_

#include <memory>

#include "ddp/observer.h"

namespace ddp {

// Shows scopes and operations in the domain "ddp". Null where no tool watches this process, or this build has no NVTX.
std::unique_ptr<Observer> CreateNvtxObserver();

}  // namespace ddp

#endif  // LIBDDP_OBSERVE_NVTX_H_
