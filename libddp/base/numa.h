// SPDX-License-Identifier: Apache-2.0
// Which memory is near a device of the PCI bus.
#ifndef LIBDDP_BASE_NUMA_H_
#define LIBDDP_BASE_NUMA_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"

namespace ddp {

// The NUMA node of a PCI device ("0000:5d:00.0"); -1 where the system does not tell, as in many virtual machines.
// Tests pass a folder as `root`.
int NumaNodeOfPci(const std::string& bus_id, const std::string& root = "");

// The memory that comes to be behind [data, data + bytes), whole pages, is taken from `node` while that has any. Shared
// memory obeys for all its processes. An error names the system call: some containers do not permit it.
absl::Status PreferNode(void* data, size_t bytes, int node);

}  // namespace ddp

#endif  // LIBDDP_BASE_NUMA_H_
