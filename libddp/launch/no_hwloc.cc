// SPDX-License-Identifier: Apache-2.0
#include <sched.h>

#include <cerrno>
#include <memory>

#include "libddp/launch/topology.h"

namespace ddp {

std::vector<int> BoundCpus() {
  std::vector<int> cpus;
  // The kernel refuses (EINVAL) a set too small for the machine: double it until it fits.
  for (int limit = CPU_SETSIZE; limit <= (1 << 20); limit *= 2) {
    const size_t bytes = CPU_ALLOC_SIZE(limit);
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(limit), [](cpu_set_t* s) { CPU_FREE(s); });
    if (set == nullptr) return cpus;
    if (sched_getaffinity(0, bytes, set.get()) == 0) {
      for (int i = 0; i < limit; ++i) {
        if (CPU_ISSET_S(i, bytes, set.get())) cpus.push_back(i);
      }
      return cpus;
    }
    if (errno != EINVAL) return cpus;
  }
  return cpus;
}

}  // namespace ddp
