// SPDX-License-Identifier: Apache-2.0
// How an operation through host memory is done and cut: by packets, kernels or the copy engines, in one phase or two,
// into tiles, over how many channels. Pure functions, equal on all ranks for equal arguments.
#ifndef LIBDDP_COMM_RING_STAGED_PLAN_H_
#define LIBDDP_COMM_RING_STAGED_PLAN_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "libddp/device/staged_blocks.h"
#include "libddp/device/staged_protocol.h"

namespace ddp {

// Where one way of an all-reduce gives place to another, in bytes of its input. Equal on all ranks of a group.
struct StagedLimits {
  static constexpr uint64_t kNever = UINT64_MAX;

  uint64_t packets = 0;                // by packets up to this size of the input or result, whichever is larger
  uint64_t packets_once = kNever;      // these in one phase up to this size, above in two
  uint64_t once = kNever;              // without packets, in one phase up to this size, above in two
  uint64_t copies = kNever;            // by the copy engines from this size on
  uint64_t least_chunk = 0;            // that the copy engines move at a time: a power of two times the least,
  uint64_t chunk = 4096;               // but at most this, for which they have memory. Multiples of 4096
  uint64_t tile = staged::kSlotBytes;  // of a slot, that kernels fill at a time
  uint64_t blocks = kNever;            // thread blocks of a kernel, at most; but as many as messages need
  uint64_t host = kNever;              // the host's processors reduce from this size on: DDP_STAGED_REDUCE
  bool operator==(const StagedLimits&) const = default;

  // What holds for so many ranks where nobody has measured.
  static StagedLimits For(int ranks);
  // Changes what `text` names, as DDP_STAGED_LIMITS has it: "packets=64K,once=0,copies=8M,chunk=4M"; all chunks are
  // then as large. "fixed" and "measure" change nothing. InvalidArgument if it cannot be understood.
  absl::Status Parse(absl::string_view text);
};

// The bytes that thread blocks of this number can send as packets in one operation, in elements of so many bytes.
uint64_t MostInPackets(int blocks, uint64_t element);

// The way of an all-reduce of `count` elements over `ranks`. In one phase every rank reads everybody's whole input: it
// is done after one wait. In two each rank reads 2 (ranks - 1) / ranks of it: of more than two ranks what is larger is
// done sooner so. By packets what is small is done soonest: they are a third more bytes, but there is no other wait.
// `blocks`: as below. The sizes are those of an element of the input and of the result.
staged::Move AllReduceMove(const StagedLimits& limits, int ranks, int blocks, uint64_t count, uint64_t in_size,
                           uint64_t out_size);

// Bytes of a chunk of an all-reduce by the copy engines. Every chunk costs some microseconds, and before the first and
// after the last one way of the bus is idle: so chunks grow with the array, but less than it.
uint64_t ChunkOf(const StagedLimits& limits, uint64_t bytes);

// Fills in channels, split, tiles and part_elements of `collective`, whose move, ranks, count, part_begin and element
// sizes are set. `blocks`: thread blocks that each rank can run at once; `slot`: bytes of a slot that are used.
void PlanTiles(int blocks, staged::Collective* collective, uint64_t slot = staged::kSlotBytes);

// The same of kAllReduceFetched, whose chunk is set: a thread block for each tile.
void PlanFetched(staged::Collective* c);

// The same of a reduction whose ranks and count are set.
void PlanBlocks(int thread_blocks, staged::BlockReduction* c);

}  // namespace ddp

#endif  // LIBDDP_COMM_RING_STAGED_PLAN_H_
