// SPDX-License-Identifier: Apache-2.0
// The processors this process may run on.
#ifndef LIBDDP_LAUNCH_TOPOLOGY_H_
#define LIBDDP_LAUNCH_TOPOLOGY_H_

#include <string>
#include <vector>

namespace ddp {

// The indices (operating system's numbers) of the logical processors that the calling thread is bound to, ascending.
// hwloc where present, else sched_getaffinity.
std::vector<int> BoundCpus();

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_TOPOLOGY_H_
