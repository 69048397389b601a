// SPDX-License-Identifier: Apache-2.0
// The process group of one rank: operations are done when the call returns.
#ifndef LIBDDP_COMM_LOCAL_GROUP_H_
#define LIBDDP_COMM_LOCAL_GROUP_H_

#include <memory>

#include "ddp/observer.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/world_ranks.h"

namespace ddp {

// `observer` may be null.
std::unique_ptr<ProcessGroup> CreateLocalGroup(Observer* observer, absl::Duration timeout, WorldRanks world_ranks = {});

}  // namespace ddp

#endif  // LIBDDP_COMM_LOCAL_GROUP_H_
