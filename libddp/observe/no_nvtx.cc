// SPDX-License-Identifier: Apache-2.0
// In place of nvtx.cc where the headers of NVTX were not found.
#include "libddp/observe/nvtx.h"

namespace ddp {

std::unique_ptr<Observer> CreateNvtxObserver() { return nullptr; }

}  // namespace ddp
