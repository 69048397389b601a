// SPDX-License-Identifier: Apache-2.0
// Errors, element types, memory and handles of libddp for C. Include ddp/ddp_c.h, which states the rules.
#ifndef DDP_C_TYPES_H_
#define DDP_C_TYPES_H_

#include <stddef.h>
#include <stdint.h>

// Marks a function that the library exports.
#if defined(__GNUC__)
#define DDP_C_API __attribute__((visibility("default")))
#else
#define DDP_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// NOLINTBEGIN(readability-identifier-naming): names as C has them

// ---------------------------------------------------------------------------------------------------------- errors

// What went wrong: DDP_OK or another of the constants below, which are the numbers of absl::StatusCode.
// docs/guide/failures.md, "Errors", says what to do.
typedef int32_t ddp_status;

// The values of ddp_status.
enum {
  DDP_OK = 0,                   // no error
  DDP_UNKNOWN = 2,              // an error of the program's own without a better code
  DDP_INVALID_ARGUMENT = 3,     // a mistake in the call; nothing has happened
  DDP_DEADLINE_EXCEEDED = 4,    // a time-out has passed
  DDP_PERMISSION_DENIED = 7,    // a file of another user, or another secret
  DDP_RESOURCE_EXHAUSTED = 8,   // not enough memory
  DDP_FAILED_PRECONDITION = 9,  // not possible in this state, or ranks disagree
  DDP_ABORTED = 10,             // a rank has given up; the text has its cause
  DDP_OUT_OF_RANGE = 11,        // throw_on_early: a rank has no more inputs; or the sum of ddp_store_add is no int64_t
  DDP_UNIMPLEMENTED = 12,       // this build has no code for it
  DDP_INTERNAL = 13,            // a defect, or a device that has failed
  DDP_UNAVAILABLE = 14,         // a rank or the store has died
  DDP_DATA_LOSS = 15,           // check_nan has found a gradient that is not finite, or a file is damaged
};

// The text of this thread's last call that failed, one line; "" before the first. Valid until the next one fails.
DDP_C_API const char* ddp_error(void);

// The name of a code: "InvalidArgument", ...; "unknown code" for any other number. Any thread; valid for ever.
DDP_C_API const char* ddp_status_name(ddp_status code);

// The ranks that caused this thread's last error (ddp::FailedRanks). Stores up to `capacity` of them at `ranks`, which
// may be NULL, and returns how many there are: 0 if no particular rank is to blame.
DDP_C_API size_t ddp_failed_ranks(int32_t* ranks, size_t capacity);

// Makes an error of the program's own, for callbacks: return ddp_fail(DDP_ABORTED, "the file is gone"). Returns `code`;
// ddp_error then has the text. A code that is none of the above becomes DDP_UNKNOWN where the library passes it on.
DDP_C_API ddp_status ddp_fail(ddp_status code, const char* text);

// DDP_VERSION of the library that runs. Any thread.
DDP_C_API int32_t ddp_version(void);

// Frees what a call returned as `void**`. Accepts a null pointer. Any thread.
DDP_C_API void ddp_free(void* memory);

// ----------------------------------------------------------------------------------------------------------- types

// The type of one element: one of the constants below.
typedef int32_t ddp_dtype;

// The values of ddp_dtype.
enum {
  DDP_FLOAT64,   // 8 bytes
  DDP_FLOAT32,   // 4 bytes
  DDP_FLOAT16,   // IEEE half, 2 bytes
  DDP_BFLOAT16,  // 2 bytes
  DDP_INT64,     // 8 bytes
  DDP_INT32,     // 4 bytes
  DDP_INT8,      // 1 byte
  DDP_UINT8,     // 1 byte
};

// How the elements of different ranks are combined: one of the constants below.
typedef int32_t ddp_reduce_op;

// The values of ddp_reduce_op. Integer sums and products wrap around.
enum {
  DDP_SUM,      // the sum
  DDP_AVG,      // the sum divided by the number of ranks; an integer quotient is truncated toward zero
  DDP_MIN,      // the smallest; NaN if any contribution is NaN, which NCCL may drop
  DDP_MAX,      // the largest; NaN likewise
  DDP_PRODUCT,  // the product
};

// The values of ddp_device.kind.
enum {
  DDP_CPU,   // the CPU
  DDP_CUDA,  // an NVIDIA GPU
};

// A processor with its memory. Zero: the CPU. Never changes its layout.
typedef struct ddp_device {
  int32_t kind;   // DDP_CPU, DDP_CUDA
  int32_t index;  // which GPU, as CUDA numbers those that this process sees; 0 for the CPU
} ddp_device;

// `count` elements at `data`. The caller owns the memory, keeps it valid until the operation is done, and does not
// change inputs until then. Never changes its layout.
typedef struct ddp_buffer {
  void* data;         // the first element; may be NULL only if `count` is 0
  size_t count;       // elements
  ddp_dtype dtype;    // their type
  ddp_device device;  // whose memory it is
} ddp_buffer;

// In place of a stream of a GPU: the host has waited for the work that the call depends on.
#define DDP_NO_STREAM ((void*)(intptr_t)-1)

// A small shared dictionary in which ranks meet (ddp::Store). Any threads at once.
typedef struct ddp_store ddp_store;

// Who this process is, and the group of all ranks (ddp::Context). One thread at a time.
typedef struct ddp_context ddp_context;

// A set of ranks that run collective operations together (ddp::ProcessGroup). Any threads at once.
typedef struct ddp_group ddp_group;

// One asynchronous operation (ddp::Work). One thread at a time.
typedef struct ddp_work ddp_work;

// Memory that a group knows (ddp::Allocation). One thread at a time.
typedef struct ddp_memory ddp_memory;

// One model's gradients and their reduction (ddp::DistributedDataParallel). One thread at a time, but for
// ddp_model_grad_ready.
typedef struct ddp_model ddp_model;

// What replaces the all-reduce of a bucket (ddp::CommHook).
typedef struct ddp_hook ddp_hook;

// The program's optimizer, as a scaler sees it (ddp::Optimizer). One thread at a time.
typedef struct ddp_optimizer ddp_optimizer;

// A loss scaler (ddp::GradScaler). One thread at a time.
typedef struct ddp_scaler ddp_scaler;

// A scope of mixed precision (ddp::Autocast). It belongs to the thread that began it.
typedef struct ddp_autocast ddp_autocast;

// A named section of the program (ddp::TraceScope). It belongs to the thread that began it.
typedef struct ddp_scope ddp_scope;

// NOLINTEND(readability-identifier-naming)

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // DDP_C_TYPES_H_
