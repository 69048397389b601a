// SPDX-License-Identifier: Apache-2.0
// Mixed precision: the optimizer's interface, loss scaling, and the types of operations. Include ddp/ddp_c.h, which
// states the rules.
#ifndef DDP_C_AMP_H_
#define DDP_C_AMP_H_

#include <stddef.h>
#include <stdint.h>

#include "ddp/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// NOLINTBEGIN(readability-identifier-naming): names as C has them

// ------------------------------------------------------------------------------------------------------- optimizer

// One step (ddp::StepOptions). The pointers refer to memory on the gradients' device, may be NULL, and are read in the
// order of the stream.
typedef struct ddp_step_options {
  size_t size;                // sizeof(ddp_step_options)
  ddp_device device;          // whose stream it is
  void* stream;               // the step runs in its order
  const float* inv_scale;     // each gradient is multiplied by it when it is read
  const uint32_t* found_inf;  // not 0: a gradient has an infinity or a NaN, and the step changes nothing
  const uint32_t* skip_step;  // not 0: the step changes nothing, for another reason
} ddp_step_options;

// The program's optimizer (ddp::Optimizer). model and step are borrowed as long as the optimizer.
typedef struct ddp_optimizer_options {
  size_t size;                                                      // sizeof(ddp_optimizer_options)
  ddp_model* model;                                                 // its gradients are read; NULL: those of grads
  const ddp_buffer* grads;                                          // ranges of gradients, copied in the call
  size_t grad_ranges;                                               // how many
  int32_t fused;                                                    // not 0: step uses inv_scale and found_inf
  ddp_status (*step)(void* user, const ddp_step_options* options);  // updates the parameters; needed
  void* user;                                                       // handed to step
} ddp_optimizer_options;

// Makes an optimizer for ddp_scaler_step.
DDP_C_API ddp_status ddp_optimizer_create(const ddp_optimizer_options* options, ddp_optimizer** optimizer);

// Frees the handle.
DDP_C_API void ddp_optimizer_destroy(ddp_optimizer* optimizer);

// ---------------------------------------------------------------------------------------------------- loss scaling

// The settings of a loss scaler (ddp::GradScalerOptions). Zero: those of torch.amp.GradScaler.
typedef struct ddp_scaler_options {
  size_t size;              // sizeof(ddp_scaler_options)
  int32_t disabled;         // not 0: it does nothing, and the scale is 1
  float initial_scale;      // finite, at least min_scale; 0: 65536
  double growth_factor;     // the scale grows by it; above 1; 0: 2
  double backoff_factor;    // the scale shrinks by it; below 1; 0: 0.5
  int32_t growth_interval;  // good steps in a row after which the scale grows; 0: 2000
  float min_scale;          // the scale never shrinks below it; 0: 1
  int32_t hysteresis;       // bad steps, since the scale last grew, at which it shrinks; 0: 1
  ddp_device device;        // of the gradients
  ddp_group* sharded_over;  // if optimizers hold only parts: the ranks that do, which outlives the scaler; or NULL
} ddp_scaler_options;

// The state of a scaler for a checkpoint (ddp::GradScalerState).
typedef struct ddp_scaler_state {
  size_t size;                 // sizeof(ddp_scaler_state); set it before the call
  int32_t enabled;             // 0 if the scaler is disabled
  float scale;                 // the present scale
  double growth_factor;        // of the options
  double backoff_factor;       // of the options
  int32_t growth_interval;     // of the options
  int32_t growth_tracker;      // good steps in a row since the scale last grew
  int32_t hysteresis_tracker;  // bad steps left until the scale shrinks
} ddp_scaler_state;

// Errors of the functions below: DDP_INVALID_ARGUMENT for gradients, streams or options that cannot be used,
// DDP_FAILED_PRECONDITION for calls in the wrong order, DDP_UNIMPLEMENTED for a device without kernels in this build. A
// call that fails with one of them has changed nothing.

// Makes a loss scaler.
DDP_C_API ddp_status ddp_scaler_create(const ddp_scaler_options* options, ddp_scaler** scaler);

// Frees the scaler, and its words on the device.
DDP_C_API void ddp_scaler_destroy(ddp_scaler* scaler);

// Stores the present scale. Waits for the device.
DDP_C_API ddp_status ddp_scaler_get_scale(ddp_scaler* scaler, float* scale);

// Where the scale is, in memory of the device, for kernels that multiply by it. Valid as long as the scaler; NULL if it
// is disabled.
DDP_C_API const float* ddp_scaler_scale_data(ddp_scaler* scaler);

// Multiplies all elements of `ranges` ranges by the scale, in place: the loss, or what the backward pass begins with.
DDP_C_API ddp_status ddp_scaler_scale(ddp_scaler* scaler, const ddp_buffer* values, size_t ranges, void* stream);

// Divides the optimizer's gradients by the scale, and looks for an infinity or a NaN. At most once between two updates,
// before the step. float16 gradients are DDP_INVALID_ARGUMENT.
DDP_C_API ddp_status ddp_scaler_unscale(ddp_scaler* scaler, ddp_optimizer* optimizer, void* stream);

// Unscales the gradients if that is not yet done, and steps unless one is not finite. At most once per optimizer
// between two updates. `options`: found_inf and skip_step, or NULL; the stream is that of the options. An error of
// step is returned.
DDP_C_API ddp_status ddp_scaler_step(ddp_scaler* scaler, ddp_optimizer* optimizer, const ddp_step_options* options);

// Stores 1 if a gradient of the optimizer was not finite since the last update, else 0. After ddp_scaler_unscale or
// ddp_scaler_step. Waits for the device.
DDP_C_API ddp_status ddp_scaler_found_inf(ddp_scaler* scaler, ddp_optimizer* optimizer, int32_t* found);

// Adapts the scale to what all optimizers found. Once per step, after them.
DDP_C_API ddp_status ddp_scaler_update(ddp_scaler* scaler, void* stream);

// Sets the scale instead: finite, at least min_scale.
DDP_C_API ddp_status ddp_scaler_set_scale(ddp_scaler* scaler, float scale, void* stream);

// Stores the address of a word on the device for ddp_model_options.nonfinite or ddp_reduce_options.nonfinite. Updates
// zero it. It lives as long as the scaler. DDP_RESOURCE_EXHAUSTED if there are more than 60 words and optimizers.
DDP_C_API ddp_status ddp_scaler_add_found_inf(ddp_scaler* scaler, uint32_t** word);

// Stores the state. Waits for the device.
DDP_C_API ddp_status ddp_scaler_get_state(ddp_scaler* scaler, ddp_scaler_state* state);

// Continues from a state. An enabled scaler cannot load that of a disabled one.
DDP_C_API ddp_status ddp_scaler_load(ddp_scaler* scaler, const ddp_scaler_state* state);

// Copies the scale and counters of rank `root` to all ranks. Collective, between an update and the next scaling.
DDP_C_API ddp_status ddp_scaler_broadcast(ddp_scaler* scaler, ddp_group* group, int32_t root);

// -------------------------------------------------------------------------------------------------------- autocast

// Begins a scope of mixed precision of this thread on devices of `device_kind`, in `dtype`: DDP_FLOAT16 or
// DDP_BFLOAT16; any other type turns it off. End scopes in reverse order.
DDP_C_API ddp_status ddp_autocast_begin(int32_t device_kind, ddp_dtype dtype, ddp_autocast** scope);

// Ends the scope and frees the handle, on the thread that began it. Accepts a null pointer.
DDP_C_API void ddp_autocast_end(ddp_autocast* scope);

// Stores the type in which to run an operation on `count` inputs (above 0) of these types, on this thread. `op`: the
// number of the constant in ddp::AutocastOp (ddp/autocast.h), from 0, else DDP_INVALID_ARGUMENT.
DDP_C_API ddp_status ddp_autocast_type_for(int32_t op, int32_t device_kind, const ddp_dtype* inputs, size_t count,
                                           ddp_dtype* dtype);

// Stores a handle of `weight` as another floating-point type (ddp::Autocast::CastWeight): a copy, the same one until
// this thread's outermost scope ends, or the weight itself if it has the type, which must then outlive the handle.
// Destroy it on this thread. Errors: DDP_INVALID_ARGUMENT, DDP_UNIMPLEMENTED.
DDP_C_API ddp_status ddp_autocast_cast_weight(const ddp_buffer* weight, ddp_dtype dtype, void* stream,
                                              ddp_memory** memory);

// NOLINTEND(readability-identifier-naming)

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // DDP_C_AMP_H_
