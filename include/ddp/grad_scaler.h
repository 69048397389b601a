// SPDX-License-Identifier: Apache-2.0
// Loss scaling: keeps small gradients within the range of 16-bit floats.
#ifndef DDP_GRAD_SCALER_H_
#define DDP_GRAD_SCALER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/optimizer.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// The settings of a GradScaler. The defaults are those of torch.amp.GradScaler.
struct GradScalerOptions {
  // If false: Scale, Unscale and Update do nothing, Step always steps, and the scale is 1.
  bool enabled = true;
  float initial_scale = 65536;  // finite, at least min_scale
  double growth_factor = 2;     // the scale grows by this factor; above 1
  double backoff_factor = 0.5;  // the scale shrinks by this factor; above 0 and below 1
  int growth_interval = 2000;   // consecutive steps without an infinity or a NaN after which the scale grows; 1 or more
  float min_scale = 1;          // the scale never shrinks below this; above 0
  // The number of steps with an infinity or a NaN, counted since the scale last grew, at which it shrinks. It also
  // shrinks at each such step after that (as in Megatron-LM).
  int hysteresis = 1;
  // The device of the gradients.
  Device device = {};
  // Set this if each rank's optimizers hold only a part of the gradients. Then each Unscale or Step reduces one number
  // over the group, so that all its ranks learn of an infinity on one of them. Not needed if gradients are averaged on
  // all ranks, because these contain the same infinities. The group must outlive the scaler.
  ProcessGroup* sharded_over = nullptr;
};

// The state of a scaler to store in a checkpoint.
struct GradScalerState {
  bool enabled = true;             // GradScalerOptions::enabled
  float scale = 0;                 // the present scale
  double growth_factor = 0;        // GradScalerOptions::growth_factor
  double backoff_factor = 0;       // GradScalerOptions::backoff_factor
  int32_t growth_interval = 0;     // GradScalerOptions::growth_interval
  int32_t growth_tracker = 0;      // good steps in a row since the scale last grew
  int32_t hysteresis_tracker = 0;  // bad steps left until the scale shrinks

  friend bool operator==(const GradScalerState&, const GradScalerState&) = default;
};

// Multiplies the loss by a scale, and divides the gradients by it before they are used. If a gradient has overflowed,
// the optimizer's step is skipped and the scale shrinks. After many good steps the scale grows. The rules and defaults
// are those of torch.amp.GradScaler, with a minimum scale and hysteresis in addition.
//
//   auto scaler = ddp::GradScaler::Create();
//   for (...) {
//     (*scaler)->Scale(loss_gradient);         // before the backward pass
//     ... backward, FinishBackward ...         // gradients are averages over all ranks
//     (*scaler)->Unscale(optimizer);           // optional: to use gradients before the step, for example to clip them
//     (*scaler)->Step(optimizer);              // unscales if not yet done; steps unless a gradient is not finite
//     (*scaler)->Update();                     // once, after all optimizers
//   }
//
// The scale and its counters are in the device's memory. With a fused() Optimizer the host never waits for them.
//
// Call Unscale and Step after FinishBackward. Then gradients are equal on all ranks, and so is the scale. If ranks run
// different numbers of steps (uneven inputs), JoinOptions::scaler makes the scale equal again.
//
// Errors: FailedPrecondition for calls in the wrong order (the message names them), InvalidArgument for gradients or
// options that cannot be used, Unimplemented for a device that this build has no kernels for. A call that returns one
// of these errors has changed nothing.
//
// Streams: with a scaler on a GPU, calls that take a stream need one of this GPU (InvalidArgument otherwise), or
// kNoStream for the one that was given last, which at first is the default stream. That stream must still exist.
//
// Thread-safety: one thread at a time.
class DDP_EXPORT GradScaler {
 public:
  // Errors: InvalidArgument names an option out of range; Unimplemented for a device without kernels in this build.
  static absl::StatusOr<std::unique_ptr<GradScaler>> Create(const GradScalerOptions& options = {});

  virtual ~GradScaler() = default;

  // GradScalerOptions::enabled.
  virtual bool enabled() const = 0;

  // The current scale, for logs. Waits for the device.
  virtual absl::StatusOr<float> scale() = 0;

  // The scale's address on the device, for a kernel that multiplies by it instead of calling Scale. The address is
  // valid for the scaler's life. Null if not enabled.
  virtual const float* scale_data() = 0;

  // Multiplies each element by the scale, in place. Pass the loss, or the gradients that the backward pass starts with.
  virtual absl::Status Scale(Buffers values, Stream stream = {}) = 0;

  // Divides the optimizer's gradients by the scale and records whether one of them is then an infinity or a NaN, in one
  // pass. Call it at most once between two Updates, and before Step. float16 gradients are an error: divided, they
  // would underflow.
  virtual absl::Status Unscale(Optimizer& optimizer, Stream stream = {}) = 0;

  // Unscales the gradients if that is not yet done, and steps unless a gradient is not finite. Call it at most once per
  // optimizer between two Updates. A fused optimizer receives device pointers to the inverse scale and to the "found an
  // infinity" word, and unscales while it steps, float16 included.
  //
  // options.found_inf may be a word from AddFoundInf that the reduction has set; then a fused step needs no check of
  // its own. options.inv_scale must be null.
  virtual absl::Status Step(Optimizer& optimizer, const StepOptions& options = {}) = 0;

  // True if a gradient of the optimizer was not finite since the last Update: its step was skipped, or will be. Call it
  // after Unscale or Step. Waits for the device.
  virtual absl::StatusOr<bool> FoundInf(const Optimizer& optimizer) = 0;

  // Adapts the scale to the infinities found in all optimizers' gradients since the last Update. Call it once per step.
  virtual absl::Status Update(Stream stream = {}) = 0;

  // Sets the scale instead. It must be finite and at least min_scale. The count of good steps does not change.
  virtual absl::Status Update(float new_scale, Stream stream = {}) = 0;

  // Returns a word on the device for DdpOptions::nonfinite or ReduceOptions::nonfinite, so that the reduction does the
  // check. Update zeroes it. It is valid for the scaler's life. ResourceExhausted if there are more than 60 of these
  // words and optimizers that are used between two Updates; a CUDA graph needs its optimizers among the 60 used last.
  virtual absl::StatusOr<uint32_t*> AddFoundInf() = 0;

  // For checkpoints. Both wait for the device. An enabled scaler cannot load the state of a scaler that was not
  // enabled. A scaler that is not enabled ignores the given state. The scale may be below min_scale, as torch's may be:
  // it then shrinks and grows as in torch until it has grown to min_scale.
  virtual absl::StatusOr<GradScalerState> State() = 0;
  // Continues from a state that State has returned.
  virtual absl::Status Load(const GradScalerState& state) = 0;

  // Collective. Copies the scale and counters of `root` to all ranks, and forgets the infinities found since the last
  // Update. Call it between an Update and the next Scale.
  virtual absl::Status Broadcast(ProcessGroup& group, int root) = 0;
};

}  // namespace ddp

#endif  // DDP_GRAD_SCALER_H_
