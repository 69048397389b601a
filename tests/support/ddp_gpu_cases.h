// SPDX-License-Identifier: Apache-2.0
// What DistributedDataParallel does with gradients on GPUs, as cases that simulated and real GPUs are put to. They work
// by way of Devices().
#ifndef TESTS_SUPPORT_DDP_GPU_CASES_H_
#define TESTS_SUPPORT_DDP_GPU_CASES_H_

#include "ddp/process_group.h"
#include "libddp/device/device_runtime.h"

namespace ddp::testing {

// What a rank works with.
struct GpuRank {
  ProcessGroup& group;
  int rank() const { return group.rank(); }
  int size() const { return group.size(); }
  Device device() const { return group.device(); }
};

// Each is collective, and throws a CheckFailure where something is wrong.
namespace gpu_cases {
void Averages(GpuRank& rank);               // several steps, buckets and streams
void OrderWithoutReduction(GpuRank& rank);  // gradients of a pass on a stream of its own, which a later one reduces
void Order(GpuRank& rank);                  // what the model does by itself, and the program's work before and after it
void OrderBetweenSteps(GpuRank& rank);      // the same of calls between steps without a stream
void Options(GpuRank& rank);                // copied gradients, 16 bits, weights, hooks, unused parameters
void Blocks(GpuRank& rank);                 // gradients in 8-bit blocks have the CPU's bits
void PowerSgd(GpuRank& rank);               // low-rank compression, beside the CPU's
void InPlace(GpuRank& rank);                // gradients inside an allocation of the program's
void Replicas(GpuRank& rank);               // values that are equal on all ranks, and that differ
void OwnKernels(GpuRank& rank);             // a hook with work of its own on a stream of its own
void Nan(GpuRank& rank);                    // check_nan
void NormAndClipping(GpuRank& rank);        // also what is not finite
void ClippingAsync(GpuRank& rank);          // every type of gradients, every order, and what is not finite
void Accumulation(GpuRank& rank);           // NoSync, Join, buffers
void GoesOn(GpuRank& rank);                 // Rebind, after unequal numbers of steps
void Misuse(GpuRank& rank);                 // streams and memory of other devices
void Scaler(GpuRank& rank);                 // GradScaler with a fused optimizer
void Statistics(GpuRank& rank);             // times by the GPU's clock
void FailsAfterReturn(GpuRank& rank);       // rank 0 aborts after FinishBackward has returned; only for 2 ranks or more
}  // namespace gpu_cases

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_DDP_GPU_CASES_H_
