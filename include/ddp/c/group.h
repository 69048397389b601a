// SPDX-License-Identifier: Apache-2.0
// Groups of ranks, their memory and their operations. Include ddp/ddp_c.h, which states the rules.
#ifndef DDP_C_GROUP_H_
#define DDP_C_GROUP_H_

#include <stddef.h>
#include <stdint.h>

#include "ddp/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// NOLINTBEGIN(readability-identifier-naming): names as C has them

// ---------------------------------------------------------------------------------------------------------- groups

// Leaves a group of ddp_context_new_group or ddp_group_split. Does nothing to a world, which its context owns. No
// thread may be in ddp_work_wait of one of its operations, or in another call of it: ddp_group_abort ends such waits.
DDP_C_API void ddp_group_destroy(ddp_group* group);

// This rank, 0 to size - 1.
DDP_C_API int32_t ddp_group_rank(const ddp_group* group);

// The number of ranks.
DDP_C_API int32_t ddp_group_size(const ddp_group* group);

// The device whose memory is fast in this group. A group of a GPU also takes CPU memory.
DDP_C_API ddp_device ddp_group_device(const ddp_group* group);

// "nccl", "hierarchical" or "local". Valid as long as the group.
DDP_C_API const char* ddp_group_backend(const ddp_group* group);

// DDP_OK, or the first cause of the group's failure: a failed group stays failed.
DDP_C_API ddp_status ddp_group_status(const ddp_group* group);

// On a GPU: a word that kernels can read, 0 until the group fails; it lives as long as the group. NULL on the CPU.
DDP_C_API const uint32_t* ddp_group_failed_word(const ddp_group* group);

// Sets the time-out, in seconds, above 0, of the operations that begin from now on; INFINITY for none. Call it on all
// ranks alike. Error: DDP_INVALID_ARGUMENT.
DDP_C_API ddp_status ddp_group_set_timeout(ddp_group* group, double timeout);

// The time-out of the operations that begin now, in seconds; INFINITY without one.
DDP_C_API double ddp_group_timeout(const ddp_group* group);

// Fails the group on all ranks: what is unfinished ends with DDP_ABORTED and the text `why`. Only the first cause
// counts.
DDP_C_API void ddp_group_abort(ddp_group* group, const char* why);

// Does what is possible of the pending operations without waiting. Call it now and then in a long computation.
DDP_C_API void ddp_group_progress(ddp_group* group);

// Creates one group for each color, of the ranks that pass it, ordered by `key`, then by rank. With a negative color
// there is none, and *part is NULL. Collective. The new group may outlive this one, but not the context. Errors: those
// of an operation.
DDP_C_API ddp_status ddp_group_split(ddp_group* group, int32_t color, int32_t key, ddp_group** part);

// ---------------------------------------------------------------------------------------------------------- memory

// Allocates `bytes` bytes (above 0) of zeroed memory that the group reduces in place. Collective: all ranks ask for the
// same sizes. The memory lives until the handle and the models that use it are gone. Errors: DDP_RESOURCE_EXHAUSTED, on
// every rank; those of an operation.
DDP_C_API ddp_status ddp_group_allocate(ddp_group* group, size_t bytes, ddp_device device, ddp_memory** memory);

// Hands memory of an earlier group to this one, which reduces it in place from now on (ddp::ProcessGroup::Register).
// Collective; no operation may use the memory meanwhile. Errors: DDP_RESOURCE_EXHAUSTED, DDP_FAILED_PRECONDITION if
// sizes differ, DDP_INVALID_ARGUMENT for CPU memory that is not from ddp_group_allocate.
DDP_C_API ddp_status ddp_group_register(ddp_group* group, ddp_memory* memory);

// The same for the program's own array of `bytes` bytes at `data` on a GPU. It must stay valid until the handle and the
// models that use it are gone; the library does not free it.
DDP_C_API ddp_status ddp_group_register_own(ddp_group* group, void* data, size_t bytes, ddp_device device,
                                            ddp_memory** memory);

// The first byte. Valid as long as the handle.
DDP_C_API void* ddp_memory_data(const ddp_memory* memory);

// The size in bytes.
DDP_C_API size_t ddp_memory_bytes(const ddp_memory* memory);

// Frees the handle. The memory goes with the last of the handle and the models that use it.
DDP_C_API void ddp_memory_destroy(ddp_memory* memory);

// ------------------------------------------------------------------------------------------------------ operations

// How a reduction combines the inputs of the ranks (ddp::ReduceOptions): postscale * op(prescale * input). Scales are
// for floating-point types only.
typedef struct ddp_reduce_options {
  size_t size;          // sizeof(ddp_reduce_options)
  ddp_reduce_op op;     // 0: the sum
  double prescale;      // of each input; 0: 1
  double postscale;     // of the result; 0: 1
  uint32_t* nonfinite;  // where 1 is stored if the result has an infinity or a NaN; NULL: not checked
} ddp_reduce_options;

// The operations below are those of ddp::ProcessGroup. They are collective, messages excepted, and have in common:
//   - in, out, buffers: arrays of `..._ranges` ranges that count as one array each; for one range: &x, 1. All ranges of
//     a call have one dtype and device; all ranks pass equal counts. `out` may be `in` (in place).
//   - counts: elements per rank, one entry for each; NULL for equal parts.
//   - options: NULL for a sum.
//   - stream: the operation starts after the work submitted to it so far. NULL on the CPU.
//   - work: where the handle goes, which the caller destroys. Until it is done, buffers must stay, inputs must not be
//     written and outputs not be read. NULL: the call waits.
//
// Errors: DDP_INVALID_ARGUMENT from the call, which has then started nothing. From the call that waits, or else from
// ddp_work_wait: DDP_DEADLINE_EXCEEDED, DDP_UNAVAILABLE (a rank has died), DDP_FAILED_PRECONDITION (ranks disagree),
// DDP_ABORTED; after them the group has failed.

// out[i] = the reduction of in[i] over all ranks. in and out have equal counts.
DDP_C_API ddp_status ddp_all_reduce(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                    size_t out_ranges, const ddp_reduce_options* options, void* stream,
                                    ddp_work** work);

// The same, but only rank `root` gets the result; the others may pass an empty out.
DDP_C_API ddp_status ddp_reduce(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                size_t out_ranges, int32_t root, const ddp_reduce_options* options, void* stream,
                                ddp_work** work);

// out = this rank's part of the reduction of in: count(in) = size * count(out), or with `counts`, counts[r] elements
// for rank r and count(in) their sum.
DDP_C_API ddp_status ddp_reduce_scatter(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                        size_t out_ranges, const size_t* counts, const ddp_reduce_options* options,
                                        void* stream, ddp_work** work);

// Copies the buffers of rank `root` to all ranks.
DDP_C_API ddp_status ddp_broadcast(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t root,
                                   void* stream, ddp_work** work);

// out = the inputs of all ranks in rank order: count(out) = size * count(in), or with `counts`, counts[r] elements of
// rank r and count(out) their sum.
DDP_C_API ddp_status ddp_all_gather(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                    size_t out_ranges, const size_t* counts, void* stream, ddp_work** work);

// Part r of in goes to rank r, part r of out comes from rank r. Parts are equal, or in_counts[r] and out_counts[r]
// elements: give both or none. With counts, in and out do not overlap.
DDP_C_API ddp_status ddp_all_to_all(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const size_t* in_counts,
                                    const ddp_buffer* out, size_t out_ranges, const size_t* out_counts, void* stream,
                                    ddp_work** work);

// out of rank `root` = the inputs of all ranks in rank order: count(out) = size * count(in). The other ranks' out is
// ignored.
DDP_C_API ddp_status ddp_gather(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                size_t out_ranges, int32_t root, void* stream, ddp_work** work);

// Part r of in of rank `root` goes to out of rank r: count(in) = size * count(out). The other ranks' in is ignored.
DDP_C_API ddp_status ddp_scatter(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                                 size_t out_ranges, int32_t root, void* stream, ddp_work** work);

// Sends a message to rank `to`, which receives it with the same tag (0 to 2^30 - 1), dtype and count. Messages of one
// tag keep their order. On a GPU, messages run in the order of the calls, and tags are not compared.
DDP_C_API ddp_status ddp_send(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t to, int32_t tag,
                              void* stream, ddp_work** work);

// Receives a message that rank `from` sends to this rank; see ddp_send.
DDP_C_API ddp_status ddp_recv(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t from, int32_t tag,
                              void* stream, ddp_work** work);

// Sends in to rank `to` and receives out from rank `from` in one call, both with this tag. in and out do not overlap.
DDP_C_API ddp_status ddp_send_recv(ddp_group* group, const ddp_buffer* in, size_t in_ranges, int32_t to,
                                   const ddp_buffer* out, size_t out_ranges, int32_t from, int32_t tag, void* stream,
                                   ddp_work** work);

// Done when all ranks have called it and their earlier collective operations are done.
DDP_C_API ddp_status ddp_barrier(ddp_group* group, ddp_work** work);

// 1 once the result is in place or the operation has failed, else 0; 1 for a null pointer. Never blocks.
DDP_C_API int32_t ddp_work_done(const ddp_work* work);

// Waits until the operation is done and returns its outcome. `timeout` in seconds, 0 and below: without limit.
// DDP_DEADLINE_EXCEEDED if it passes: the operation goes on.
DDP_C_API ddp_status ddp_work_wait(ddp_work* work, double timeout);

// Orders the work submitted to `stream` of `device` from now on after the operation, and returns at once. On the CPU it
// waits instead.
DDP_C_API ddp_status ddp_work_block_stream(ddp_work* work, ddp_device device, void* stream);

// Frees the handle. Neither cancels the operation nor waits for it.
DDP_C_API void ddp_work_destroy(ddp_work* work);

// ---------------------------------------------------------------------------------------------------- small values

// Reduces one number in place, on every rank. Collective; waits. Errors: those of an operation.
DDP_C_API ddp_status ddp_all_reduce_double(ddp_group* group, double* value, ddp_reduce_op op);

// The same for an integer.
DDP_C_API ddp_status ddp_all_reduce_int64(ddp_group* group, int64_t* value, ddp_reduce_op op);

// Stores on every rank a copy of the `count` bytes of rank `root`, which ddp_free frees, and their number. The other
// ranks' bytes are ignored. Collective; waits. Errors: those of an operation.
DDP_C_API ddp_status ddp_broadcast_bytes(ddp_group* group, const void* bytes, size_t count, int32_t root, void** result,
                                         size_t* result_count);

// Stores on every rank the bytes of all ranks one after the other, which ddp_free frees; counts[r] of them, an array of
// the size of the group, are rank r's. Collective; waits. Errors: those of an operation.
DDP_C_API ddp_status ddp_gather_bytes(ddp_group* group, const void* bytes, size_t count, void** result, size_t* counts);

// Makes `state` equal on all ranks after a failure (ddp::SyncState): all get that of the lowest rank with the lowest
// *step, which is then the last step that all have done. INT64_MAX after an error: the state of this rank may be half
// overwritten; pass it like that when you call again. Collective; waits. Errors: those of an operation;
// DDP_INVALID_ARGUMENT, on every rank, if `state` of one cannot be used; DDP_DATA_LOSS, on every rank, if none has the
// state of a step any more.
DDP_C_API ddp_status ddp_sync_state(ddp_group* group, const ddp_buffer* state, size_t ranges, int64_t* step);

// ---------------------------------------------------------------------------------------------------------- scopes

// Begins a named section of this thread, which observers, the timeline and NVIDIA's tools show. Scopes of a thread may
// nest. `name` must live as long as the context.
DDP_C_API ddp_status ddp_scope_begin(const ddp_group* group, const char* name, ddp_scope** scope);

// Ends the section and frees the handle. Accepts a null pointer.
DDP_C_API void ddp_scope_end(ddp_scope* scope);

// NOLINTEND(readability-identifier-naming)

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // DDP_C_GROUP_H_
