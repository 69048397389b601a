// SPDX-License-Identifier: Apache-2.0
// The interface between the library and an optimizer.
#ifndef DDP_OPTIMIZER_H_
#define DDP_OPTIMIZER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "ddp/types.h"

namespace ddp {

// Options of one step. The pointers refer to memory on the gradients' device, may be null, and are read in the order of
// `stream`.
struct StepOptions {
  Stream stream = {};  // the step runs in its order
  // Each gradient is multiplied by *inv_scale when it is read. The gradient in memory does not change.
  const float* inv_scale = nullptr;
  // If *found_inf or *skip_step is not 0, the step changes nothing: no value, no state, no step count.
  const uint32_t* found_inf = nullptr;  // not 0: a gradient has an infinity or a NaN
  const uint32_t* skip_step = nullptr;  // not 0: skip for any other reason
};

// An optimizer, as GradScaler sees it. Implement it in the code that owns the parameters and the optimizer state. How
// it uses a gradient is up to the implementation.
//
// Thread-safety: one thread at a time.
class DDP_EXPORT Optimizer {
 public:
  virtual ~Optimizer() = default;

  // The gradients that Step reads, as flat ranges: grad_spans() of a DistributedDataParallel, or one range per
  // gradient. All are on one device. If the optimizer is sharded over ranks: only those of this rank, which may be
  // none.
  virtual Buffers grads() const = 0;

  // True if Step uses inv_scale and found_inf, so that the host need not know whether the step is skipped. If false,
  // both are null in every Step.
  virtual bool fused() const = 0;

  // Updates the parameters from their gradients. On a GPU it returns before the update has run.
  virtual absl::Status Step(const StepOptions& options) = 0;
};

}  // namespace ddp

#endif  // DDP_OPTIMIZER_H_
