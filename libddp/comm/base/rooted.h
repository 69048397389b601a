// Operations with a root on CPU memory, made of a group's other operations. The arguments are right.
#ifndef LIBDDP_COMM_BASE_ROOTED_H_
#define LIBDDP_COMM_BASE_ROOTED_H_

#include <memory>

#include "ddp/process_group.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/joined_work.h"

namespace ddp {

// `orphans`: the group's.
Work ReduceByAllReduce(ProcessGroup& group, const CheckedCall& call, std::shared_ptr<OrphanedMemory> orphans);
Work MoveByMessages(ProcessGroup& group, const CheckedCall& call);  // gather and scatter

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_ROOTED_H_
