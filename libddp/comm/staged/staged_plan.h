// How an operation through host memory is cut: into tiles, over how many channels, in one phase or two. Pure functions,
// equal on all ranks for equal arguments.
#ifndef LIBDDP_COMM_STAGED_STAGED_PLAN_H_
#define LIBDDP_COMM_STAGED_STAGED_PLAN_H_

#include <cstdint>

#include "libddp/device/staged_protocol.h"

namespace ddp {

// The way of an all-reduce of `bytes` of input over `ranks`. In one phase every rank reads everybody's whole input: it
// is done after one wait. In two each rank reads 2 (ranks - 1) / ranks of it: of more than two ranks what is larger is
// done sooner so. By packets what is small is done soonest: they are twice as many bytes, but there is no other wait.
// `blocks`: as below.
staged::Move AllReduceMove(int ranks, int blocks, uint64_t bytes);

// Fills in channels, split, tiles and part_elements of `collective`, whose move, ranks, count, part_begin and element
// sizes are set. `blocks`: thread blocks that each rank can run at once.
void PlanTiles(int blocks, staged::Collective* collective);

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_STAGED_PLAN_H_
