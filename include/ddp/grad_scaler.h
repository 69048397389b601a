// Loss scaling, which keeps small gradients within the range of 16-bit floats.
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

struct GradScalerOptions {
  // false: Scale, Unscale and Update do nothing, Step just steps, and the scale is 1.
  bool enabled = true;
  float initial_scale = 65536;
  double growth_factor = 2;     // above 1
  double backoff_factor = 0.5;  // between 0 and 1
  int growth_interval = 2000;   // steps without an infinity or a NaN, one after the other, after which the scale grows
  float min_scale = 1;          // which backing off never goes below; above 0
  // The scale backs off at the so many-th step with an infinity or a NaN since it grew last, and at each one after that
  // (as Megatron-LM's scaler).
  int hysteresis = 1;
  // Where the gradients are.
  Device device = {};
  // Set where each rank's optimizers hold a part of the gradients only: what one of its ranks finds, all of them learn,
  // by a reduction of one number in each Unscale or Step. Not needed where gradients are averaged on all ranks: they
  // have the same infinities. Outlives the scaler.
  ProcessGroup* sharded_over = nullptr;
};

// Everything that a checkpoint needs to hold of a scaler.
struct GradScalerState {
  bool enabled = true;
  float scale = 0;
  double growth_factor = 0;
  double backoff_factor = 0;
  int32_t growth_interval = 0;
  int32_t growth_tracker = 0;
  int32_t hysteresis_tracker = 0;

  friend bool operator==(const GradScalerState&, const GradScalerState&) = default;
};

// Multiplies the loss by a scale, and divides the gradients by it before they are used. Where a gradient has overflown,
// the optimizer's step is left out and the scale made smaller; after many good steps it grows. The rules and defaults
// are those of torch.amp.GradScaler, with a least scale and hysteresis besides.
//
//   auto scaler = ddp::GradScaler::Create();
//   for (...) {
//     (*scaler)->Scale(loss_gradient);         // before the backward pass
//     ... backward, FinishBackward ...         // gradients are averages over all ranks
//     (*scaler)->Unscale(optimizer);           // only to look at gradients before the step, to clip them say
//     (*scaler)->Step(optimizer);              // unscales, if that is not done; steps, unless a gradient is not finite
//     (*scaler)->Update();                     // once, after all optimizers
//   }
//
// The scale and its counters live on the device. With an Optimizer that is fused() the host never waits for them.
//
// Unscale and Step come after FinishBackward. Then gradients are the same on all ranks, and so is the scale. Where
// ranks make different numbers of steps (uneven inputs), JoinOptions::scaler makes it equal again.
//
// Errors: FailedPrecondition where calls come in the wrong order (it says which), InvalidArgument for gradients or
// options that cannot be used, Unimplemented for a device that this build has no kernels for. After either the call has
// changed nothing.
//
// Thread-safety: one thread at a time.
class DDP_EXPORT GradScaler {
 public:
  static absl::StatusOr<std::unique_ptr<GradScaler>> Create(const GradScalerOptions& options = {});

  virtual ~GradScaler() = default;

  virtual bool enabled() const = 0;

  // For people, and for programs that may wait for the device.
  virtual absl::StatusOr<float> scale() = 0;

  // Where the scale lies on the device, for a kernel that multiplies by it in place of Scale. The address is good for
  // the scaler's life. Null if not enabled.
  virtual const float* scale_data() = 0;

  // Multiplies each element by the scale, in place: the loss, or the gradients by which the backward pass begins.
  virtual absl::Status Scale(Buffers values, Stream stream = {}) = 0;

  // Divides the optimizer's gradients by the scale, and takes note whether one of them is not finite, in one pass. At
  // most once between two Updates, and before Step. float16 gradients are refused: divided, they would vanish.
  virtual absl::Status Unscale(Optimizer& optimizer, Stream stream = {}) = 0;

  // Unscales, if that is not done, and steps unless a gradient is not finite. At most once between two Updates. A fused
  // optimizer gets the scale and the finding where they lie on the device, and unscales as it goes, float16 too.
  //
  // options.found_inf, if set, is a word from AddFoundInf, where the reduction has noted what it found: a fused step
  // then needs no check of its own. options.inv_scale must be null.
  virtual absl::Status Step(Optimizer& optimizer, const StepOptions& options = {}) = 0;

  // Whether a gradient of the optimizer was not finite, since the last Update: then its step was, or will be, left out.
  // After Unscale or Step. Waits for the device.
  virtual absl::StatusOr<bool> FoundInf(const Optimizer& optimizer) = 0;

  // Adapts the scale to what was found in all optimizers' gradients since the last Update, and begins anew.
  virtual absl::Status Update(Stream stream = {}) = 0;

  // Sets the scale instead, at least min_scale and finite. The count of good steps stays.
  virtual absl::Status Update(float new_scale, Stream stream = {}) = 0;

  // A word on the device for DdpOptions::nonfinite (or ReduceOptions's), zeroed by Update; good for the scaler's life.
  // The check then rides on the reduction. For float16 gradients with ReduceOp::kSum leave it to Step: their sum may
  // overflow only as it is rounded, after the check. ResourceExhausted after some dozen words and optimizers.
  virtual absl::StatusOr<uint32_t*> AddFoundInf() = 0;

  // For checkpoints. Both wait for the device. A state of a scaler that was not enabled cannot be loaded into one that
  // is; one that is not enabled ignores what it is given.
  virtual absl::StatusOr<GradScalerState> State() = 0;
  virtual absl::Status Load(const GradScalerState& state) = 0;

  // Collective, between an Update and the next Scale: gives all ranks the scale and counters of `root`, and forgets
  // what was found since the last Update.
  virtual absl::Status Broadcast(ProcessGroup& group, int root) = 0;
};

}  // namespace ddp

#endif  // DDP_GRAD_SCALER_H_
