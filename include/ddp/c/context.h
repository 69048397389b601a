// SPDX-License-Identifier: Apache-2.0
// Stores, and the context: who this process is, and how ranks meet. Include ddp/ddp_c.h, which states the rules.
#ifndef DDP_C_CONTEXT_H_
#define DDP_C_CONTEXT_H_

#include <stddef.h>
#include <stdint.h>

#include "ddp/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// NOLINTBEGIN(readability-identifier-naming): names as C has them

// ---------------------------------------------------------------------------------------------------------- stores

// Where a file store is, and whose (ddp::FileStoreOptions). path and run_id are needed.
typedef struct ddp_file_store_options {
  size_t size;         // sizeof(ddp_file_store_options)
  const char* path;    // the file; created if missing, in a folder that all ranks see; not on NFS
  const char* run_id;  // identifies the run; the same on all ranks
  int32_t world_size;  // when so many stores have opened the file, its name is removed; 0: it stays
} ddp_file_store_options;

// Where a TCP store is, who serves it, and who may use it (ddp::TcpStoreOptions). port and run_id are needed.
typedef struct ddp_tcp_store_options {
  size_t size;         // sizeof(ddp_tcp_store_options)
  const char* host;    // where all ranks reach the rank that serves; NULL: the loopback interface
  int32_t port;        // 1 to 65535; the same on all ranks
  int32_t serve;       // not 0 on the rank that serves it
  const char* run_id;  // identifies the run; the same on all ranks
  const char* secret;  // a text that only the ranks know; NULL: DDP_STORE_SECRET
  int32_t world_size;  // when so many ranks have connected, the file with the secret is removed; 0: it stays
  double timeout;      // seconds to wait for the server to start; 0: 10 minutes
} ddp_tcp_store_options;

// A store for ranks that are threads of this process, which share the handle.
DDP_C_API ddp_status ddp_store_create_memory(ddp_store** store);

// A store in a file, for ranks of one host (ddp::CreateFileStore). Errors: DDP_INVALID_ARGUMENT or
// DDP_PERMISSION_DENIED if the file cannot be used, DDP_DATA_LOSS if it has other data, DDP_FAILED_PRECONDITION if
// another run uses it.
DDP_C_API ddp_status ddp_store_create_file(const ddp_file_store_options* options, ddp_store** store);

// A store that one rank serves over TCP (ddp::CreateTcpStore). Errors: DDP_INVALID_ARGUMENT for an option or a port
// that cannot be used, DDP_DEADLINE_EXCEEDED without a server, DDP_PERMISSION_DENIED for another secret,
// DDP_FAILED_PRECONDITION for another run.
DDP_C_API ddp_status ddp_store_create_tcp(const ddp_tcp_store_options* options, ddp_store** store);

// Sets `key` to the `bytes` bytes at `value`, up to 16 MiB, visible to all ranks. `value` may be NULL if there are
// none. `timeout` in seconds, 0: 10 minutes. Errors: DDP_DEADLINE_EXCEEDED, DDP_UNAVAILABLE if the server is gone.
DDP_C_API ddp_status ddp_store_set(ddp_store* store, const char* key, const void* value, size_t bytes, double timeout);

// Waits until some rank has set `key`; stores a copy of its value, which ddp_free frees, and its size. `timeout` and
// errors as of ddp_store_set.
DDP_C_API ddp_status ddp_store_get(ddp_store* store, const char* key, double timeout, void** value, size_t* bytes);

// Adds `delta` to the integer at `key`, at first 0, as one step; stores the new value. `timeout` and errors as of
// ddp_store_set; also DDP_OUT_OF_RANGE if the sum is no int64_t: then the integer stays as it is. Do not set or get the
// same key.
DDP_C_API ddp_status ddp_store_add(ddp_store* store, const char* key, int64_t delta, double timeout, int64_t* sum);

// Frees the handle. Contexts that use the store keep it alive.
DDP_C_API void ddp_store_destroy(ddp_store* store);

// --------------------------------------------------------------------------------------------------------- context

// One operation of one rank (ddp::OperationEvent). The library owns the event, which is valid during the call; later
// versions append members. Times are nanoseconds on CLOCK_MONOTONIC, 0: not reached.
typedef struct ddp_operation_event {
  int32_t state;         // 0 called, 1 done, 2 failed
  ddp_dtype dtype;       // of its elements
  const char* kind;      // "all_reduce", ...
  uint64_t group;        // identifies the group within this process
  uint64_t sequence;     // the number of the call in its group, the same on all ranks
  uint64_t count;        // elements
  int32_t bucket;        // of gradients; -1: none
  int64_t called_ns;     // the program made the call
  int64_t announced_ns;  // the peers can see it
  int64_t ready_ns;      // all ranks that it waits for have announced it
  int64_t ended_ns;      // done or failed
} ddp_operation_event;

// One bucket in one reduced step (ddp::BucketEvent). Owner, validity and times as of ddp_operation_event.
typedef struct ddp_bucket_event {
  int64_t step;         // 1, 2, ...
  int32_t bucket;       // its number in the plan
  size_t bytes;         // of its gradients
  int64_t ready_ns;     // its last gradient was announced on this rank
  int64_t launched_ns;  // its reduction was handed to the group
  int64_t done_ns;      // its reduction ended
} ddp_bucket_event;

// The begin or the end of a ddp_scope (ddp::ScopeEvent). Owner, validity and times as of ddp_operation_event.
typedef struct ddp_scope_event {
  const char* name;  // the one of ddp_scope_begin
  int32_t begin;     // 1 at the begin, 0 at the end
  int64_t begin_ns;  // when it began
  int64_t end_ns;    // 0 at the begin
} ddp_scope_event;

// The program's functions for events (ddp::Observer). They may be called by any thread at any time, also by several at
// once, must be fast and must not call the library. NULL: not wanted.
typedef struct ddp_observer {
  size_t size;                                                         // sizeof(ddp_observer)
  void* user;                                                          // handed to each call
  void (*on_operation)(void* user, const ddp_operation_event* event);  // called, and ended
  void (*on_bucket)(void* user, const ddp_bucket_event* event);        // at the end of a reduced step
  void (*on_scope)(void* user, const ddp_scope_event* event);          // begun, and ended
} ddp_observer;

// What ddp_context_create may be told (ddp::ContextOptions). Zero: the launcher and the environment say everything.
// Another context, also a later one, needs another store.
typedef struct ddp_context_options {
  size_t size;                   // sizeof(ddp_context_options)
  ddp_store* store;              // where ranks meet; with it, rank and world_size count, else the launcher's variables
  int32_t rank;                  // this rank, 0 to world_size - 1
  int32_t world_size;            // the number of ranks
  int32_t local_rank;            // its number among the ranks of this host
  int32_t local_world_size;      // the number of ranks of this host; 0: both as rank and world_size
  ddp_device device;             // of parameters and gradients; index -1: the GPU of the local rank
  const char* backend;           // "auto", "nccl", "hierarchical", "local"; NULL: DDP_BACKEND, else "auto"
  int32_t fresh_probe;           // not 0: "auto" tries NCCL out, whatever an earlier start has found
  const void* mpi_comm;          // the address of an MPI_Comm, whose ranks are the world
  void* nccl_comm;               // the address of an ncclComm_t, borrowed until the context is destroyed
  double timeout;                // seconds for an operation and for the start; 0: DDP_TIMEOUT, else 10 minutes
  double stall_warning;          // seconds until a warning; 0: DDP_STALL_WARNING, else 30; negative: none
  const char* trace;             // a file for the timeline; NULL: DDP_TRACE, else none
  const ddp_observer* observer;  // read in the call; `user` must outlive the context
} ddp_context_options;

// Finds this rank, and returns when all ranks have arrived (ddp::Context::Create). Collective. Errors name the missing
// ranks or the contradiction: DDP_DEADLINE_EXCEEDED, DDP_INVALID_ARGUMENT, DDP_FAILED_PRECONDITION, DDP_UNAVAILABLE.
DDP_C_API ddp_status ddp_context_create(const ddp_context_options* options, ddp_context** context);

// Leaves the world. Destroy first what was made from the context.
DDP_C_API void ddp_context_destroy(ddp_context* context);

// This rank, 0 to world_size - 1.
DDP_C_API int32_t ddp_context_rank(const ddp_context* context);

// The number of ranks at the start.
DDP_C_API int32_t ddp_context_world_size(const ddp_context* context);

// This rank's number among the ranks of its host.
DDP_C_API int32_t ddp_context_local_rank(const ddp_context* context);

// The number of ranks of this host.
DDP_C_API int32_t ddp_context_local_world_size(const ddp_context* context);

// The device of the options, with its actual index. The CPU for a null pointer.
DDP_C_API ddp_device ddp_context_device(const ddp_context* context);

// "mpirun", "srun", "torchrun", "mpi", "none" or "options". Valid as long as the context.
DDP_C_API const char* ddp_context_launcher(const ddp_context* context);

// Which backend is used, and why, in one line; "" if there was nothing to choose. Valid until ddp_context_recover.
DDP_C_API const char* ddp_context_backend_choice(const ddp_context* context);

// The group of all ranks, borrowed: do not destroy it. After ddp_context_recover it is another one; the one before
// stays valid, and failed.
DDP_C_API ddp_group* ddp_context_world(ddp_context* context);

// Makes a new world after this one has failed (ddp::Context::Recover). Collective over the ranks that are left.
// `patience`: seconds to wait for the others, 0: the time-out. Errors: DDP_FAILED_PRECONDITION if the world works or
// there is no store, DDP_INTERNAL if a GPU has not come free, those of ddp_context_new_group. No other thread may use
// the world meanwhile.
DDP_C_API ddp_status ddp_context_recover(ddp_context* context, double patience);

// Creates a group of `count` ranks of the world, this one included; ranks[i] becomes rank i (ddp::Context::NewGroup).
// Collective over the listed ranks, which all pass the same list. `timeout` in seconds, 0: that of the context. Errors:
// DDP_FAILED_PRECONDITION without a store, DDP_DEADLINE_EXCEEDED if ranks do not arrive, DDP_UNAVAILABLE, at once, if
// they have died (ddp_failed_ranks has them).
DDP_C_API ddp_status ddp_context_new_group(ddp_context* context, const int32_t* ranks, size_t count, double timeout,
                                           ddp_group** group);

// NOLINTEND(readability-identifier-naming)

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // DDP_C_CONTEXT_H_
