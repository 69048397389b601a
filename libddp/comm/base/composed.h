// SPDX-License-Identifier: Apache-2.0
// Operations that are made of a group's other operations. The arguments are right.
#ifndef LIBDDP_COMM_BASE_COMPOSED_H_
#define LIBDDP_COMM_BASE_COMPOSED_H_

#include <memory>

#include "ddp/process_group.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/joined_work.h"

namespace ddp {

// `orphans`: the group's.
Work ReduceByAllReduce(ProcessGroup& group, const CheckedCall& call, std::shared_ptr<OrphanedMemory> orphans);
Work ReducePartByPart(ProcessGroup& group, const CheckedCall& call);  // reduce-scatter with counts
// Gather, scatter, all-to-all with counts and send_recv, in CPU memory.
Work MoveByMessages(ProcessGroup& group, const CheckedCall& call);

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_COMPOSED_H_
