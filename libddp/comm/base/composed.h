// SPDX-License-Identifier: Apache-2.0
// Operations that are made of a group's other operations. The arguments are right.
#ifndef LIBDDP_COMM_BASE_COMPOSED_H_
#define LIBDDP_COMM_BASE_COMPOSED_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/joined_work.h"

namespace ddp {

// Starts a step of a composed call.
using StartStep = absl::FunctionRef<Work(const CheckedCall&)>;
using StartMessageStep = absl::FunctionRef<Work(const MessageCall&)>;

// `start` does an all-reduce. `orphans`: the group's.
Work ReduceByAllReduce(const CheckedCall& call, int rank, StartStep start, std::shared_ptr<OrphanedMemory> orphans);
// Reduce-scatter with counts. `start` reduces to one rank.
Work ReducePartByPart(const CheckedCall& call, StartStep start);
// Gather, scatter, all-to-all with counts and send_recv, in CPU memory.
Work MoveByMessages(const ProcessGroup& group, const CheckedCall& call, StartMessageStep start);

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_COMPOSED_H_
