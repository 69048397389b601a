// SPDX-License-Identifier: Apache-2.0
// Communication hooks, and models: gradients and their reduction. Include ddp/ddp_c.h, which states the rules.
#ifndef DDP_C_MODEL_H_
#define DDP_C_MODEL_H_

#include <stddef.h>
#include <stdint.h>

#include "ddp/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// NOLINTBEGIN(readability-identifier-naming): names as C has them

// ----------------------------------------------------------------------------------------------------------- hooks

// The settings of ddp_hook_create_power_sgd (ddp::PowerSgdOptions). The same on all ranks.
typedef struct ddp_power_sgd_options {
  size_t size;          // sizeof(ddp_power_sgd_options)
  int32_t rank;         // rank of the approximation; 0: 1
  int64_t start_step;   // the number of uncompressed steps at the start; 0: 10; negative: none
  double min_ratio;     // parameters that would not shrink by this factor are not compressed; 0: 2
  int32_t cold_start;   // not 0: no warm start
  int32_t no_feedback;  // not 0: no error feedback
  uint64_t seed;        // of the first approximation; 0: 1
} ddp_power_sgd_options;

// The formats of ddp_hook_create_block_compression.
enum {
  DDP_BLOCK_INT8,         // steps of the same size
  DDP_BLOCK_FLOAT8_E4M3,  // fp8 with 4 bits of exponent and 3 of mantissa: finer near zero
};

// A hook that does the same as no hook: one all-reduce per bucket.
DDP_C_API ddp_status ddp_hook_create_all_reduce(ddp_hook** hook);

// Sends gradients as `wire`, DDP_FLOAT16 or DDP_BFLOAT16. `inner`, if not NULL, communicates the buckets of that type;
// the new hook keeps it alive. ddp_model_create refuses any other type (DDP_INVALID_ARGUMENT).
DDP_C_API ddp_status ddp_hook_create_compression(ddp_dtype wire, ddp_hook* inner, ddp_hook** hook);

// Sends gradients in 8 bits, with a float32 scale for each block of 128 elements. `format`: DDP_BLOCK_INT8 or
// DDP_BLOCK_FLOAT8_E4M3, else DDP_INVALID_ARGUMENT.
DDP_C_API ddp_status ddp_hook_create_block_compression(int32_t format, ddp_hook** hook);

// Low-rank compression with error feedback (PowerSGD). ddp_model_create refuses options out of range
// (DDP_INVALID_ARGUMENT).
DDP_C_API ddp_status ddp_hook_create_power_sgd(const ddp_power_sgd_options* options, ddp_hook** hook);

// Frees the handle. A model that uses the hook keeps it alive; a hook belongs to one model.
DDP_C_API void ddp_hook_destroy(ddp_hook* hook);

// ----------------------------------------------------------------------------------------------------------- model

// One trainable tensor (ddp::Parameter). In an array of parameters all have the same `size`.
typedef struct ddp_parameter {
  size_t size;           // sizeof(ddp_parameter)
  const char* name;      // unique in the model
  const int64_t* shape;  // `dimensions` numbers whose product is value.count; may be NULL
  size_t dimensions;     // of shape
  ddp_buffer value;      // the tensor itself; data NULL: the library owns it
  ddp_buffer grad;       // its gradient, of value's count; data NULL: the library owns it, of value's dtype and device
  int32_t frozen;        // not 0: not trained at present
} ddp_parameter;

// State of the model that is no parameter (ddp::ModelBuffer). In an array all have the same `size`.
typedef struct ddp_model_buffer {
  size_t size;         // sizeof(ddp_model_buffer)
  const char* name;    // unique in the model
  ddp_buffer data;     // its memory, which the caller owns
  int32_t replicated;  // not 0: equal on all ranks after every backward pass; check_replicas compares it
} ddp_model_buffer;

// For ddp_model_options.bucket_bytes: the size follows from measurements.
#define DDP_AUTO_BUCKET_BYTES SIZE_MAX

// The values of ddp_model_options.unused: what a parameter without a gradient in a reduced step means.
enum {
  DDP_UNUSED_ERROR,   // an error, which names the parameter and the rank
  DDP_UNUSED_DETECT,  // not used: it contributes zeros; if no rank used it, its gradient does not change
};

// How a model's gradients are reduced (ddp::DdpOptions). All ranks use the same. Zero is fine for most programs.
typedef struct ddp_model_options {
  size_t size;                       // sizeof(ddp_model_options)
  size_t bucket_bytes;               // bytes of a bucket; 0: 25 MiB; DDP_AUTO_BUCKET_BYTES: measured
  size_t first_bucket_bytes;         // bytes of the first bucket, and about of the last; 0: up to 1 MiB
  size_t piece_bytes;                // reduces a bucket in operations of at most so many bytes; 0: in one
  int32_t no_replan;                 // not 0: buckets never change
  int32_t sum;                       // not 0: the sum instead of the mean
  int32_t weighted;                  // not 0: each rank has the weight of ddp_model_set_weight
  double gradient_predivide_factor;  // divides before the sum, multiplies after it; 0: 1
  int32_t reduce_in_float32;         // not 0: adds 16-bit gradients in float32 on every backend
  uint32_t* nonfinite;               // where 1 is stored if a result has an infinity or a NaN; NULL: not checked
  int32_t unused;                    // DDP_UNUSED_...
  int32_t static_graph;              // not 0: each rank uses the same parameters in every step as in its first
  int32_t copy_gradients;            // not 0: the program owns the gradients; they are copied for the reduction
  int32_t no_broadcast_parameters;   // not 0: values are not copied from rank 0 at the start
  const ddp_model_buffer* buffers;   // to copy from rank 0; may be NULL
  size_t buffer_count;               // of buffers
  int32_t no_broadcast_buffers;      // not 0: buffers are copied at the start only
  int64_t check_replicas;            // compares values every so many steps; 0: DDP_CHECK_REPLICAS; negative: never
  int32_t check_nan;                 // not 0: looks for infinities and NaN in what each rank contributes
  int32_t time_replays;              // not 0: measures replays of CUDA graphs, too, which makes them longer
  ddp_hook* hook;                    // replaces the all-reduce of each bucket; NULL: an all-reduce
} ddp_model_options;

// Makes a model of `count` parameters, the same on all ranks, and copies rank 0's values. Collective. The group must
// outlive the model. Errors: DDP_FAILED_PRECONDITION if ranks differ, DDP_INVALID_ARGUMENT for parameters or options
// that cannot be used, DDP_RESOURCE_EXHAUSTED, those of an operation.
DDP_C_API ddp_status ddp_model_create(ddp_group* group, const ddp_parameter* parameters, size_t count,
                                      const ddp_model_options* options, ddp_model** model);

// Frees the model and the memory that it owns. In the middle of a step it aborts the group.
DDP_C_API void ddp_model_destroy(ddp_model* model);

// The number of parameters.
DDP_C_API size_t ddp_model_size(const ddp_model* model);

// Where the value of parameter `index` is; data NULL for an index out of range. Valid as long as the model.
DDP_C_API ddp_buffer ddp_model_value(const ddp_model* model, size_t index);

// Where its gradient is, or is to be written; data NULL for an index out of range. Valid as long as the model. Do not
// access it between ddp_model_grad_ready and ddp_model_finish_backward.
DDP_C_API ddp_buffer ddp_model_grad(const ddp_model* model, size_t index);

// The gradients that the library owns, as one range per dtype (ddp::DistributedDataParallel::grad_spans). Stores up to
// `capacity` ranges at `spans`, which may be NULL, and returns how many there are.
DDP_C_API size_t ddp_model_grad_spans(const ddp_model* model, ddp_buffer* spans, size_t capacity);

// The same for the values that the library owns.
DDP_C_API size_t ddp_model_value_spans(const ddp_model* model, ddp_buffer* spans, size_t capacity);

// ----------------------------------------------------------------------------------------------------------- steps

// Call it before the forward pass of a model with buffers: copies rank 0's to all ranks. Collective.
// DDP_FAILED_PRECONDITION in the middle of a reduced step.
DDP_C_API ddp_status ddp_model_begin_forward(ddp_model* model, void* stream);

// Announces that gradient `index` has been written, on a GPU by work submitted to `stream`. Its errors come from
// ddp_model_finish_backward. Any threads at once.
DDP_C_API void ddp_model_grad_ready(ddp_model* model, size_t index, void* stream);

// Gives the memory of gradient `index` for this step, before its ddp_model_grad_ready; it stays valid until
// ddp_model_finish_backward. Errors: DDP_INVALID_ARGUMENT for another count, dtype or device, DDP_FAILED_PRECONDITION
// for a gradient that the library owns or reduces in place.
DDP_C_API ddp_status ddp_model_set_grad(ddp_model* model, size_t index, ddp_buffer grad);

// Ends the step: waits for all reductions; on a GPU only the stream waits, unless it is DDP_NO_STREAM. Collective.
// Errors reach every rank: DDP_FAILED_PRECONDITION for a gradient that was not announced or for replicas that differ,
// DDP_DATA_LOSS of check_nan, DDP_OUT_OF_RANGE of a join, those of an operation and of hooks.
DDP_C_API ddp_status ddp_model_finish_backward(ddp_model* model, void* stream);

// On a GPU: a word in its memory, not 0 after ddp_model_finish_backward, in the order of its stream, if the step's
// gradients must not be used. It lives as long as the model. NULL on the CPU.
DDP_C_API const uint32_t* ddp_model_skip_step(const ddp_model* model);

// For another group in which the steps exchange something, such as statistics of batches: from now on
// ddp_model_finish_backward and ddp_model_skip_step report a failure of `group` as they do one of the model's own
// group, which fails, too. Between steps, on all ranks that have such a group. It must outlive the model, unless
// ddp_model_rebind comes first: then it is not watched any more.
DDP_C_API ddp_status ddp_model_watch(ddp_model* model, ddp_group* group);

// Sets all gradients to zero, not in the middle of a reduced step. Its errors come from ddp_model_finish_backward.
DDP_C_API void ddp_model_zero_grad(ddp_model* model, void* stream);

// Sets this rank's weight for the steps that begin later: finite, not negative, at first 1. For models that are
// weighted. Its errors come from ddp_model_finish_backward.
DDP_C_API void ddp_model_set_weight(ddp_model* model, double weight);

// Stores the norm of all gradients, computed in float64. `order`: 1, 2 or INFINITY, else DDP_INVALID_ARGUMENT. On a GPU
// the host waits for the stream. DDP_FAILED_PRECONDITION in the middle of a reduced step, as from those below.
DDP_C_API ddp_status ddp_model_grad_norm(ddp_model* model, double order, void* stream, double* norm);

// Scales all gradients by max_norm / (norm + 1e-6) if that is below 1, and stores the norm before. If it is not finite,
// the gradients do not change. `order` and waiting as for ddp_model_grad_norm.
DDP_C_API ddp_status ddp_model_clip_grad_norm(ddp_model* model, double max_norm, double order, void* stream,
                                              double* norm);

// The same without a wait on the host, in the order of `stream`. Stores where the norm is: in memory of the model's
// device, which lives as long as the model; the next call overwrites it.
DDP_C_API ddp_status ddp_model_clip_grad_norm_async(ddp_model* model, double max_norm, double order, void* stream,
                                                    const double** norm);

// DDP_OK if steps of this model can be captured into a CUDA graph, else DDP_FAILED_PRECONDITION with the reason, the
// same on all ranks. Any thread.
DDP_C_API ddp_status ddp_model_can_capture(const ddp_model* model);

// Copies the values and buffers of rank `root` to all ranks. Collective, between steps, else DDP_FAILED_PRECONDITION.
DDP_C_API ddp_status ddp_model_broadcast_values(ddp_model* model, int32_t root, void* stream);

// Replaces the list of parameters; names identify those that stay, which keep their memory. Collective, between steps.
// Errors as of ddp_model_create; the model then does not change.
DDP_C_API ddp_status ddp_model_set_parameters(ddp_model* model, const ddp_parameter* parameters, size_t count);

// Moves the model to another group, after a failure to that of the remaining ranks. Collective over `group`, which must
// outlive the model. Values and gradients do not change: see ddp_sync_state. DDP_FAILED_PRECONDITION in the middle of a
// step whose group works; after any other error, call it again.
DDP_C_API ddp_status ddp_model_rebind(ddp_model* model, ddp_group* group);

// Backward passes that begin between this and ddp_model_end_no_sync are not reduced. Pairs may nest.
DDP_C_API ddp_status ddp_model_begin_no_sync(ddp_model* model);

// Ends the last ddp_model_begin_no_sync; DDP_FAILED_PRECONDITION without one.
DDP_C_API ddp_status ddp_model_end_no_sync(ddp_model* model);

// How a join treats ranks that have no more inputs (ddp::JoinOptions). The same on all ranks.
typedef struct ddp_join_options {
  size_t size;                                 // sizeof(ddp_join_options)
  int32_t divide_by_active;                    // not 0: means are over the ranks that still have inputs
  int32_t throw_on_early;                      // not 0: DDP_OUT_OF_RANGE on all ranks once one has no more inputs
  ddp_scaler* scaler;                          // of the training, which must outlive the join; may be NULL
  ddp_status (*on_shadowed_step)(void* user);  // after each step of the others, on a rank without inputs; may be NULL
  void* user;                                  // handed to on_shadowed_step
} ddp_join_options;

// Begins a loop in which ranks run different numbers of steps. Collective, between steps. DDP_FAILED_PRECONDITION
// within another one, and in the middle of a reduced step; the step goes on.
DDP_C_API ddp_status ddp_model_begin_join(ddp_model* model, const ddp_join_options* options);

// Ends the loop: serves the other ranks until all have finished, then makes the models equal. Collective. Errors:
// DDP_FAILED_PRECONDITION without ddp_model_begin_join or in the middle of a step, DDP_OUT_OF_RANGE of throw_on_early,
// those of an operation. After an error the loop has not ended. Call it again after a mistake, or after
// ddp_model_rebind; call ddp_model_leave_join after an error that all ranks have had.
DDP_C_API ddp_status ddp_model_finish_join(ddp_model* model);

// Ends the loop without the other ranks, as the destructor of ddp::DistributedDataParallel::Join does. Before
// ddp_model_finish_join, and before an error that all ranks have had (DDP_OUT_OF_RANGE of throw_on_early, a NaN that
// check_nan found, weights of 0), it aborts the group, so that no peer waits for this rank: after a failure call it
// before ddp_model_rebind. Does nothing outside of a loop.
DDP_C_API ddp_status ddp_model_leave_join(ddp_model* model);

// Times of one bucket in the last step (ddp::BucketTimes), in nanoseconds since its first ddp_model_grad_ready.
typedef struct ddp_bucket_times {
  size_t bytes;         // of its gradients
  size_t gradients;     // how many
  size_t ranges;        // contiguous ranges of memory that they form
  size_t operations;    // operations of the group
  int64_t ready_ns;     // its last gradient was announced on this rank
  int64_t launched_ns;  // its reduction was passed to the group
  int64_t done_ns;      // its reduction ended
} ddp_bucket_times;

// What a model reports of its steps (ddp::DdpStatistics).
typedef struct ddp_statistics {
  size_t size;               // sizeof(ddp_statistics); set it before the call
  int64_t steps;             // reduced steps so far
  int64_t plans;             // how often buckets were planned
  int64_t exposed_ns;        // in the last reduced step: communication that the backward pass did not hide
  int64_t communication_ns;  // in the last reduced step: while a bucket was launched but not done
  double overlap;            // over all steps: 1 - sum(exposed) / sum(communication), 0 to 1
  size_t buckets;            // how many there are
} ddp_statistics;

// Stores the times of the last step, and up to `capacity` of its buckets, in launch order, at `buckets`, which may be
// NULL.
DDP_C_API ddp_status ddp_model_statistics(ddp_model* model, ddp_statistics* statistics, ddp_bucket_times* buckets,
                                          size_t capacity);

// NOLINTEND(readability-identifier-naming)

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // DDP_C_MODEL_H_
