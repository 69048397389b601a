// SPDX-License-Identifier: Apache-2.0
// A communication hook that reduces as DataParallel does: for comparison.
#ifndef EXAMPLES_TRAIN_GATHER_HOOK_H_
#define EXAMPLES_TRAIN_GATHER_HOOK_H_

#include <memory>

#include "ddp/comm_hook.h"
#include "examples/nn/device.h"

namespace examples {

// Rank 0 receives each bucket from all other ranks, one after the other, adds the buckets in rank order, scales the
// sum, and broadcasts the result. The time grows with the number of ranks, and only the link of rank 0 is busy.
// Gradients are float32. `device` is that of the gradients and must outlive the hook. `ranks` is the size of the group.
std::shared_ptr<ddp::CommHook> CreateGatherHook(nn::Device& device, int ranks);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_GATHER_HOOK_H_
