// libddp for C (C99) and for languages that bind to C. The headers for C++ explain each call; here is what differs.
//
// Handles. A function that makes one stores it in its last argument, or a null pointer if it fails. The matching
// ..._destroy frees it and accepts a null pointer. Destroy everything that was made from a context before the context.
//
// Errors. A function that can fail returns a ddp_status; ddp_error() then has the text, one line. No exception leaves
// the library. A null handle or pointer where one is needed is DDP_INVALID_ARGUMENT.
//
// Structs of options start with their size and are zero otherwise, which means the defaults:
//
//   ddp_model_options options = {.size = sizeof options, .bucket_bytes = 1 << 20};
//
// Later versions append members only, so that a program that was compiled earlier still fits. A null pointer to options
// stands for the defaults.
//
// Times are in seconds. Unless said otherwise, a time-out of 0 is the default, and a negative one has no limit.
//
// Streams are a cudaStream_t as void*. On the CPU they are ignored: pass NULL. On a GPU, NULL is CUDA's default stream,
// and DDP_NO_STREAM says that the host has waited for the work that the call depends on.
//
// Thread-safety: ddp_error belongs to the calling thread. Stores, groups and ddp_model_grad_ready may be used by any
// threads at once; everything else by one thread at a time.
#ifndef DDP_DDP_C_H_
#define DDP_DDP_C_H_

#include <stddef.h>
#include <stdint.h>

#include "ddp/version.h"

#if defined(__GNUC__)
#define DDP_C_API __attribute__((visibility("default")))
#else
#define DDP_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------- errors

// NOLINTBEGIN(readability-identifier-naming): names as C has them

// What went wrong, by the numbers of absl::StatusCode; docs/guide.md, "Errors", says what to do.
typedef int32_t ddp_status;
enum {
  DDP_OK = 0,
  DDP_UNKNOWN = 2,
  DDP_INVALID_ARGUMENT = 3,
  DDP_DEADLINE_EXCEEDED = 4,
  DDP_PERMISSION_DENIED = 7,
  DDP_RESOURCE_EXHAUSTED = 8,
  DDP_FAILED_PRECONDITION = 9,
  DDP_ABORTED = 10,
  DDP_OUT_OF_RANGE = 11,
  DDP_UNIMPLEMENTED = 12,
  DDP_INTERNAL = 13,
  DDP_UNAVAILABLE = 14,
  DDP_DATA_LOSS = 15
};

DDP_C_API const char* ddp_error(void);                   // of this thread's last call that failed; valid until the next
DDP_C_API const char* ddp_status_name(ddp_status code);  // "InvalidArgument", ...

// The ranks that caused this thread's last error (ddp::FailedRanks). Stores up to `capacity` of them, returns how many
// there are.
DDP_C_API size_t ddp_failed_ranks(int32_t* ranks, size_t capacity);

// Makes an error of the program's own, for callbacks: return ddp_fail(DDP_ABORTED, "the file is gone").
DDP_C_API ddp_status ddp_fail(ddp_status code, const char* text);

DDP_C_API int32_t ddp_version(void);    // DDP_VERSION of the library that runs
DDP_C_API void ddp_free(void* memory);  // frees what a call returned as `void**`

// ----------------------------------------------------------------------------------------------------------- types

typedef int32_t ddp_dtype;
enum { DDP_FLOAT64, DDP_FLOAT32, DDP_FLOAT16, DDP_BFLOAT16, DDP_INT64, DDP_INT32, DDP_INT8, DDP_UINT8 };

typedef int32_t ddp_reduce_op;
enum { DDP_SUM, DDP_AVG, DDP_MIN, DDP_MAX, DDP_PRODUCT };

enum { DDP_CPU, DDP_CUDA };
typedef struct ddp_device {
  int32_t kind;   // DDP_CPU, DDP_CUDA
  int32_t index;  // of the GPU
} ddp_device;

// `count` elements at `data`, which the caller owns. Never changes its layout.
typedef struct ddp_buffer {
  void* data;
  size_t count;
  ddp_dtype dtype;
  ddp_device device;
} ddp_buffer;

#define DDP_NO_STREAM ((void*)(intptr_t)-1)

typedef struct ddp_store ddp_store;
typedef struct ddp_context ddp_context;
typedef struct ddp_group ddp_group;
typedef struct ddp_work ddp_work;
typedef struct ddp_memory ddp_memory;
typedef struct ddp_model ddp_model;
typedef struct ddp_hook ddp_hook;
typedef struct ddp_optimizer ddp_optimizer;
typedef struct ddp_scaler ddp_scaler;
typedef struct ddp_autocast ddp_autocast;
typedef struct ddp_scope ddp_scope;

// ---------------------------------------------------------------------------------------------------------- stores

typedef struct ddp_file_store_options {
  size_t size;
  const char* path;
  const char* run_id;
  int32_t world_size;
} ddp_file_store_options;

typedef struct ddp_tcp_store_options {
  size_t size;
  const char* host;  // NULL: the loopback interface
  int32_t port;
  int32_t serve;  // not 0 on the rank that serves it
  const char* run_id;
  const char* secret;  // NULL: DDP_STORE_SECRET
  int32_t world_size;
  double timeout;
} ddp_tcp_store_options;

DDP_C_API ddp_status ddp_store_create_memory(ddp_store** store);
DDP_C_API ddp_status ddp_store_create_file(const ddp_file_store_options* options, ddp_store** store);
DDP_C_API ddp_status ddp_store_create_tcp(const ddp_tcp_store_options* options, ddp_store** store);
DDP_C_API ddp_status ddp_store_set(ddp_store* store, const char* key, const void* value, size_t bytes, double timeout);
DDP_C_API ddp_status ddp_store_get(ddp_store* store, const char* key, double timeout, void** value, size_t* bytes);
DDP_C_API ddp_status ddp_store_add(ddp_store* store, const char* key, int64_t delta, double timeout, int64_t* sum);
DDP_C_API void ddp_store_destroy(ddp_store* store);  // contexts that use it keep it alive

// --------------------------------------------------------------------------------------------------------- context

// The library owns the events; they are valid during the call. Members as in ddp/observer.h; later versions append.
typedef struct ddp_operation_event {
  int32_t state;  // 0 called, 1 done, 2 failed
  ddp_dtype dtype;
  const char* kind;
  uint64_t group, sequence, count;
  int32_t bucket;
  int64_t called_ns, announced_ns, ready_ns, ended_ns;
} ddp_operation_event;
typedef struct ddp_bucket_event {
  int64_t step;
  int32_t bucket;
  size_t bytes;
  int64_t ready_ns, launched_ns, done_ns;
} ddp_bucket_event;
typedef struct ddp_scope_event {
  const char* name;
  int32_t begin;
  int64_t begin_ns, end_ns;
} ddp_scope_event;

// Callbacks may come from any thread at any time, must be fast and must not call the library. NULL: not wanted.
typedef struct ddp_observer {
  size_t size;
  void* user;
  void (*on_operation)(void* user, const ddp_operation_event* event);
  void (*on_bucket)(void* user, const ddp_bucket_event* event);
  void (*on_scope)(void* user, const ddp_scope_event* event);
} ddp_observer;

typedef struct ddp_context_options {
  size_t size;
  ddp_store* store;  // with it, rank and world_size count; without it the launcher's variables
  int32_t rank, world_size;
  int32_t local_rank, local_world_size;  // local_world_size 0: both as rank and world_size
  ddp_device device;                     // index -1: the GPU of the local rank
  const char* backend;                   // NULL: DDP_BACKEND, else "auto"
  int32_t fresh_probe;
  const void* mpi_comm;  // the address of an MPI_Comm
  void* nccl_comm;       // the address of an ncclComm_t
  double timeout;
  double stall_warning;          // negative: none
  const char* trace;             // a file for the timeline
  const ddp_observer* observer;  // read in the call; `user` must outlive the context
} ddp_context_options;

DDP_C_API ddp_status ddp_context_create(const ddp_context_options* options, ddp_context** context);
DDP_C_API void ddp_context_destroy(ddp_context* context);
DDP_C_API int32_t ddp_context_rank(const ddp_context* context);  // these are -1 for a null pointer
DDP_C_API int32_t ddp_context_world_size(const ddp_context* context);
DDP_C_API int32_t ddp_context_local_rank(const ddp_context* context);
DDP_C_API int32_t ddp_context_local_world_size(const ddp_context* context);
DDP_C_API ddp_device ddp_context_device(const ddp_context* context);
DDP_C_API const char* ddp_context_launcher(const ddp_context* context);
DDP_C_API const char* ddp_context_backend_choice(const ddp_context* context);  // in one line; "" without a choice

// Borrowed. After ddp_context_recover it is another one; the one before stays valid, and failed.
DDP_C_API ddp_group* ddp_context_world(ddp_context* context);
DDP_C_API ddp_status ddp_context_recover(ddp_context* context, double patience);
DDP_C_API ddp_status ddp_context_new_group(ddp_context* context, const int32_t* ranks, size_t count, double timeout,
                                           ddp_group** group);

// ---------------------------------------------------------------------------------------------------------- groups

DDP_C_API void ddp_group_destroy(ddp_group* group);  // not for the world
DDP_C_API int32_t ddp_group_rank(const ddp_group* group);
DDP_C_API int32_t ddp_group_size(const ddp_group* group);
DDP_C_API ddp_device ddp_group_device(const ddp_group* group);
DDP_C_API const char* ddp_group_backend(const ddp_group* group);
DDP_C_API ddp_status ddp_group_status(const ddp_group* group);
DDP_C_API const uint32_t* ddp_group_failed_word(const ddp_group* group);
DDP_C_API ddp_status ddp_group_set_timeout(ddp_group* group, double timeout);  // above 0
DDP_C_API double ddp_group_timeout(const ddp_group* group);
DDP_C_API void ddp_group_abort(ddp_group* group, const char* why);
DDP_C_API void ddp_group_progress(ddp_group* group);
DDP_C_API ddp_status ddp_group_split(ddp_group* group, int32_t color, int32_t key,
                                     ddp_group** part);  // part may be NULL

// Memory that the group reduces in place. It lives until the handle and the models that use it are gone.
DDP_C_API ddp_status ddp_group_allocate(ddp_group* group, size_t bytes, ddp_device device, ddp_memory** memory);
DDP_C_API ddp_status ddp_group_register(ddp_group* group, ddp_memory* memory);
// The program's own array on a GPU. It must stay valid until the handle and the models that use it are gone.
DDP_C_API ddp_status ddp_group_register_own(ddp_group* group, void* data, size_t bytes, ddp_device device,
                                            ddp_memory** memory);
DDP_C_API void* ddp_memory_data(const ddp_memory* memory);
DDP_C_API size_t ddp_memory_bytes(const ddp_memory* memory);
DDP_C_API void ddp_memory_destroy(ddp_memory* memory);

typedef struct ddp_reduce_options {
  size_t size;
  ddp_reduce_op op;
  double prescale, postscale;  // 0: 1
  uint32_t* nonfinite;
} ddp_reduce_options;

// The operations of ProcessGroup. Inputs and outputs are arrays of ranges that count as one array each, for one range:
// &x, 1. `work`: where to store the handle of the operation; NULL: the call waits for it. Counts may be NULL for equal
// parts, else they have one entry per rank. NULL for the options: a sum.
DDP_C_API ddp_status ddp_all_reduce(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                    size_t out_ranges, const ddp_reduce_options* options, void* stream,
                                    ddp_work** work);
DDP_C_API ddp_status ddp_reduce(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                size_t out_ranges, int32_t root, const ddp_reduce_options* options, void* stream,
                                ddp_work** work);
DDP_C_API ddp_status ddp_reduce_scatter(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                        size_t out_ranges, const size_t* counts, const ddp_reduce_options* options,
                                        void* stream, ddp_work** work);
DDP_C_API ddp_status ddp_broadcast(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t root,
                                   void* stream, ddp_work** work);
DDP_C_API ddp_status ddp_all_gather(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                    size_t out_ranges, const size_t* counts, void* stream, ddp_work** work);
DDP_C_API ddp_status ddp_all_to_all(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const size_t* in_counts,
                                    const ddp_buffer* out, size_t out_ranges, const size_t* out_counts, void* stream,
                                    ddp_work** work);
DDP_C_API ddp_status ddp_gather(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                size_t out_ranges, int32_t root, void* stream, ddp_work** work);
DDP_C_API ddp_status ddp_scatter(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                 size_t out_ranges, int32_t root, void* stream, ddp_work** work);
DDP_C_API ddp_status ddp_send(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t to, int32_t tag,
                              void* stream, ddp_work** work);
DDP_C_API ddp_status ddp_recv(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t from, int32_t tag,
                              void* stream, ddp_work** work);
DDP_C_API ddp_status ddp_send_recv(ddp_group* group, const ddp_buffer* in, size_t in_ranges, int32_t to,
                                   const ddp_buffer* out, size_t out_ranges, int32_t from, int32_t tag, void* stream,
                                   ddp_work** work);
DDP_C_API ddp_status ddp_barrier(ddp_group* group, ddp_work** work);

DDP_C_API int32_t ddp_work_done(const ddp_work* work);
DDP_C_API ddp_status ddp_work_wait(ddp_work* work, double timeout);  // 0 and below: without limit
DDP_C_API ddp_status ddp_work_block_stream(ddp_work* work, ddp_device device, void* stream);
DDP_C_API void ddp_work_destroy(ddp_work* work);  // neither cancels nor waits

// Small values. All of these wait.
DDP_C_API ddp_status ddp_all_reduce_double(ddp_group* group, double* value, ddp_reduce_op op);
DDP_C_API ddp_status ddp_all_reduce_int64(ddp_group* group, int64_t* value, ddp_reduce_op op);
DDP_C_API ddp_status ddp_broadcast_bytes(ddp_group* group, const void* bytes, size_t count, int32_t root, void** result,
                                         size_t* result_count);
// The bytes of all ranks one after the other; counts[r] of them are rank r's.
DDP_C_API ddp_status ddp_gather_bytes(ddp_group* group, const void* bytes, size_t count, void** result, size_t* counts);
// Makes `state` equal on all ranks and sets *step to the last step that all have done (ddp/sync_state.h).
DDP_C_API ddp_status ddp_sync_state(ddp_group* group, const ddp_buffer* state, size_t ranges, int64_t* step);

// `name` must live as long as the context.
DDP_C_API ddp_status ddp_scope_begin(const ddp_group* group, const char* name, ddp_scope** scope);
DDP_C_API void ddp_scope_end(ddp_scope* scope);

// ----------------------------------------------------------------------------------------------------------- hooks

typedef struct ddp_power_sgd_options {
  size_t size;
  int32_t rank;         // 0: 1
  int64_t start_step;   // 0: 10; negative: compress from the first step on
  double min_ratio;     // 0: 2
  int32_t cold_start;   // not 0: no warm start
  int32_t no_feedback;  // not 0: no error feedback
  uint64_t seed;        // 0: 1
} ddp_power_sgd_options;

enum { DDP_BLOCK_INT8, DDP_BLOCK_FLOAT8_E4M3 };

DDP_C_API ddp_status ddp_hook_create_all_reduce(ddp_hook** hook);
DDP_C_API ddp_status ddp_hook_create_compression(ddp_dtype wire, ddp_hook* inner,
                                                 ddp_hook** hook);  // inner may be NULL
DDP_C_API ddp_status ddp_hook_create_block_compression(int32_t format, ddp_hook** hook);
DDP_C_API ddp_status ddp_hook_create_power_sgd(const ddp_power_sgd_options* options, ddp_hook** hook);
DDP_C_API void ddp_hook_destroy(ddp_hook* hook);  // a model that uses it keeps it alive

// ----------------------------------------------------------------------------------------------------------- model

// In an array of parameters all have the same size. value.data NULL: the library owns the values. grad.data NULL: the
// library owns the gradient, of the value's count, dtype and device.
typedef struct ddp_parameter {
  size_t size;
  const char* name;
  const int64_t* shape;  // may be NULL
  size_t dimensions;
  ddp_buffer value;
  ddp_buffer grad;
  int32_t frozen;
} ddp_parameter;

typedef struct ddp_model_buffer {
  size_t size;
  const char* name;
  ddp_buffer data;
  int32_t replicated;
} ddp_model_buffer;

#define DDP_AUTO_BUCKET_BYTES SIZE_MAX
enum { DDP_UNUSED_ERROR, DDP_UNUSED_DETECT };

typedef struct ddp_model_options {
  size_t size;
  size_t bucket_bytes;  // 0: 25 MiB; DDP_AUTO_BUCKET_BYTES: measured
  size_t first_bucket_bytes;
  size_t piece_bytes;
  int32_t no_replan;  // not 0: buckets never change
  int32_t sum;        // not 0: the sum instead of the mean
  int32_t weighted;
  double gradient_predivide_factor;  // 0: 1
  int32_t reduce_in_float32;
  uint32_t* nonfinite;
  int32_t unused;  // DDP_UNUSED_...
  int32_t static_graph;
  int32_t copy_gradients;
  int32_t no_broadcast_parameters;
  const ddp_model_buffer* buffers;
  size_t buffer_count;
  int32_t no_broadcast_buffers;
  int64_t check_replicas;  // 0: DDP_CHECK_REPLICAS, or never; negative: never
  int32_t check_nan;
  ddp_hook* hook;
} ddp_model_options;

DDP_C_API ddp_status ddp_model_create(ddp_group* group, const ddp_parameter* parameters, size_t count,
                                      const ddp_model_options* options, ddp_model** model);
DDP_C_API void ddp_model_destroy(ddp_model* model);
DDP_C_API size_t ddp_model_size(const ddp_model* model);
DDP_C_API ddp_buffer ddp_model_value(const ddp_model* model, size_t index);  // data NULL for an index out of range
DDP_C_API ddp_buffer ddp_model_grad(const ddp_model* model, size_t index);
// Store up to `capacity` ranges, return how many there are.
DDP_C_API size_t ddp_model_grad_spans(const ddp_model* model, ddp_buffer* spans, size_t capacity);
DDP_C_API size_t ddp_model_value_spans(const ddp_model* model, ddp_buffer* spans, size_t capacity);

DDP_C_API ddp_status ddp_model_begin_forward(ddp_model* model, void* stream);
// Its errors come from ddp_model_finish_backward.
DDP_C_API void ddp_model_grad_ready(ddp_model* model, size_t index, void* stream);
DDP_C_API ddp_status ddp_model_set_grad(ddp_model* model, size_t index, ddp_buffer grad);
DDP_C_API ddp_status ddp_model_finish_backward(ddp_model* model, void* stream);
DDP_C_API const uint32_t* ddp_model_skip_step(const ddp_model* model);
DDP_C_API void ddp_model_zero_grad(ddp_model* model, void* stream);
DDP_C_API void ddp_model_set_weight(ddp_model* model, double weight);
// order: 1, 2 or INFINITY; norm: before clipping.
DDP_C_API ddp_status ddp_model_grad_norm(ddp_model* model, double order, void* stream, double* norm);
DDP_C_API ddp_status ddp_model_clip_grad_norm(ddp_model* model, double max_norm, double order, void* stream,
                                              double* norm);
DDP_C_API ddp_status ddp_model_clip_grad_norm_async(ddp_model* model, double max_norm, double order, void* stream,
                                                    const double** norm);
DDP_C_API ddp_status ddp_model_can_capture(const ddp_model* model);
DDP_C_API ddp_status ddp_model_broadcast_values(ddp_model* model, int32_t root, void* stream);
DDP_C_API ddp_status ddp_model_set_parameters(ddp_model* model, const ddp_parameter* parameters, size_t count);
DDP_C_API ddp_status ddp_model_rebind(ddp_model* model, ddp_group* group);

// Backward passes that begin in between are not reduced. Pairs may nest.
DDP_C_API ddp_status ddp_model_begin_no_sync(ddp_model* model);
DDP_C_API ddp_status ddp_model_end_no_sync(ddp_model* model);

typedef struct ddp_join_options {
  size_t size;
  int32_t divide_by_active;
  int32_t throw_on_early;
  ddp_scaler* scaler;
  ddp_status (*on_shadowed_step)(void* user);
  void* user;
} ddp_join_options;

DDP_C_API ddp_status ddp_model_begin_join(ddp_model* model, const ddp_join_options* options);
DDP_C_API ddp_status ddp_model_finish_join(ddp_model* model);

typedef struct ddp_bucket_times {
  size_t bytes, gradients, ranges, operations;
  int64_t ready_ns, launched_ns, done_ns;
} ddp_bucket_times;
typedef struct ddp_statistics {
  size_t size;  // set it before the call
  int64_t steps, plans, exposed_ns, communication_ns;
  double overlap;
  size_t buckets;  // how many there are
} ddp_statistics;
DDP_C_API ddp_status ddp_model_statistics(ddp_model* model, ddp_statistics* statistics, ddp_bucket_times* buckets,
                                          size_t capacity);

// ------------------------------------------------------------------------------------------------- mixed precision

typedef struct ddp_step_options {
  size_t size;
  ddp_device device;
  void* stream;
  const float* inv_scale;
  const uint32_t* found_inf;
  const uint32_t* skip_step;
} ddp_step_options;

typedef struct ddp_optimizer_options {
  size_t size;
  ddp_model* model;         // its gradients are the optimizer's; NULL: `grads` are
  const ddp_buffer* grads;  // copied
  size_t grad_ranges;
  int32_t fused;
  ddp_status (*step)(void* user, const ddp_step_options* options);
  void* user;
} ddp_optimizer_options;

DDP_C_API ddp_status ddp_optimizer_create(const ddp_optimizer_options* options, ddp_optimizer** optimizer);
DDP_C_API void ddp_optimizer_destroy(ddp_optimizer* optimizer);

typedef struct ddp_scaler_options {
  size_t size;
  int32_t disabled;
  float initial_scale;                   // 0: 65536
  double growth_factor, backoff_factor;  // 0: 2 and 0.5
  int32_t growth_interval;               // 0: 2000
  float min_scale;                       // 0: 1
  int32_t hysteresis;                    // 0: 1
  ddp_device device;
  ddp_group* sharded_over;
} ddp_scaler_options;
typedef struct ddp_scaler_state {
  size_t size;  // set it before the call
  int32_t enabled;
  float scale;
  double growth_factor, backoff_factor;
  int32_t growth_interval, growth_tracker, hysteresis_tracker;
} ddp_scaler_state;

DDP_C_API ddp_status ddp_scaler_create(const ddp_scaler_options* options, ddp_scaler** scaler);
DDP_C_API void ddp_scaler_destroy(ddp_scaler* scaler);
DDP_C_API ddp_status ddp_scaler_get_scale(ddp_scaler* scaler, float* scale);
DDP_C_API const float* ddp_scaler_scale_data(ddp_scaler* scaler);
DDP_C_API ddp_status ddp_scaler_scale(ddp_scaler* scaler, const ddp_buffer* values, size_t ranges, void* stream);
DDP_C_API ddp_status ddp_scaler_unscale(ddp_scaler* scaler, ddp_optimizer* optimizer, void* stream);
// `options`: found_inf and skip_step, or NULL. The stream is that of the options.
DDP_C_API ddp_status ddp_scaler_step(ddp_scaler* scaler, ddp_optimizer* optimizer, const ddp_step_options* options);
DDP_C_API ddp_status ddp_scaler_found_inf(ddp_scaler* scaler, ddp_optimizer* optimizer, int32_t* found);
DDP_C_API ddp_status ddp_scaler_update(ddp_scaler* scaler, void* stream);
DDP_C_API ddp_status ddp_scaler_set_scale(ddp_scaler* scaler, float scale, void* stream);
DDP_C_API ddp_status ddp_scaler_add_found_inf(ddp_scaler* scaler, uint32_t** word);
DDP_C_API ddp_status ddp_scaler_get_state(ddp_scaler* scaler, ddp_scaler_state* state);
DDP_C_API ddp_status ddp_scaler_load(ddp_scaler* scaler, const ddp_scaler_state* state);
DDP_C_API ddp_status ddp_scaler_broadcast(ddp_scaler* scaler, ddp_group* group, int32_t root);

// Autocast: scopes of one thread, ended in reverse order. `op`: the number of the constant in ddp::AutocastOp.
DDP_C_API ddp_status ddp_autocast_begin(int32_t device_kind, ddp_dtype dtype, ddp_autocast** scope);
DDP_C_API void ddp_autocast_end(ddp_autocast* scope);
DDP_C_API ddp_status ddp_autocast_type_for(int32_t op, int32_t device_kind, const ddp_dtype* inputs, size_t count,
                                           ddp_dtype* dtype);
DDP_C_API ddp_status ddp_autocast_cast_weight(const ddp_buffer* weight, ddp_dtype dtype, void* stream,
                                              ddp_memory** memory);

// NOLINTEND(readability-identifier-naming)

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // DDP_DDP_C_H_
