// What the library asks of an optimizer.
#ifndef DDP_OPTIMIZER_H_
#define DDP_OPTIMIZER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "ddp/types.h"

namespace ddp {

// One step. The pointers lie on the gradients' device, may be null, and are read in the order of `stream`.
struct StepOptions {
  Stream stream = {};
  // Every gradient is multiplied by it where it is read; what lies in memory stays.
  const float* inv_scale = nullptr;
  // Where one of them is not 0, the step changes nothing: no value, no state, no count of steps.
  const uint32_t* found_inf = nullptr;  // a gradient has an infinity or a NaN
  const uint32_t* skip_step = nullptr;  // anything else
};

// Implemented by whoever owns parameters and their optimizer's state. What it does with a gradient is its own affair;
// GradScaler and sharding need no more than this.
//
// Thread-safety: one thread at a time.
class DDP_EXPORT Optimizer {
 public:
  virtual ~Optimizer() = default;

  // The gradients that Step reads, as flat ranges: grad_spans() of a DistributedDataParallel, or one range for each
  // gradient. All on one device. Where ranks share out the optimizer's work, those of this rank; perhaps none.
  virtual Buffers grads() const = 0;

  // Whether Step heeds inv_scale and found_inf, so that the host need not know whether there is to be a step. Otherwise
  // both are null in every Step.
  virtual bool fused() const = 0;

  // Changes the parameters by their gradients. On a GPU it returns before that has happened.
  virtual absl::Status Step(const StepOptions& options) = 0;
};

}  // namespace ddp

#endif  // DDP_OPTIMIZER_H_
