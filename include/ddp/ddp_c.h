// SPDX-License-Identifier: Apache-2.0
// libddp for C (C99) and for languages that bind to C. Include this header alone: it includes those in ddp/c. Each name
// is explained there, with what differs from C++; the headers for C++ tell more about each call.
//
// Handles. A function that makes one stores it in its last argument, or a null pointer if it fails. The matching
// ..._destroy frees it and accepts a null pointer. Destroy everything that was made from a context before the context.
//
// Errors. A function that can fail returns a ddp_status; ddp_error() then has the text, one line. No exception leaves
// the library. A null handle or pointer where one is needed is DDP_INVALID_ARGUMENT. A function that returns something
// else has a value for a null handle: -1, an empty text, a null pointer or 0.
//
// Structs of options start with their size and are zero otherwise, which means the defaults:
//
//   ddp_model_options options = {.size = sizeof options, .bucket_bytes = 1 << 20};
//
// Later versions append members only, so that a program that was compiled earlier still fits. A null pointer to options
// stands for the defaults. The library copies options and texts in the call, unless a comment says otherwise.
//
// Numbers. Sizes and counts of memory are in elements, unless their name says bytes. Times are in seconds, those of
// events in nanoseconds (ns). Unless said otherwise, a time-out of 0 is the default, and a negative one has no limit.
//
// Streams are a cudaStream_t as void*. On the CPU they are ignored: pass NULL. On a GPU, NULL is CUDA's default stream,
// and DDP_NO_STREAM says that the host has waited for the work that the call depends on.
//
// Thread-safety: ddp_error belongs to the calling thread. Stores, groups and ddp_model_grad_ready may be used by any
// threads at once; everything else by one thread at a time. What is stored through a pointer belongs to the caller.
//
// Collective: all ranks of the group make the call, in the same order, with equal options.
#ifndef DDP_DDP_C_H_
#define DDP_DDP_C_H_

#include "ddp/c/amp.h"
#include "ddp/c/context.h"
#include "ddp/c/group.h"
#include "ddp/c/model.h"
#include "ddp/c/types.h"
#include "ddp/version.h"

#endif  // DDP_DDP_C_H_
