// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/topology.h"

#include <hwloc.h>

#include <memory>
#include <type_traits>

namespace ddp {

std::vector<int> BoundCpus() {
  std::vector<int> cpus;
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return cpus;
  const std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, void (*)(hwloc_topology_t)> topology(
      raw, hwloc_topology_destroy);
  // Caches, groups and devices are not asked for: leaving them out makes loading several times faster.
  hwloc_topology_set_all_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  if (hwloc_topology_load(raw) != 0) return cpus;
  const std::unique_ptr<hwloc_bitmap_s, void (*)(hwloc_bitmap_t)> bound(hwloc_bitmap_alloc(), hwloc_bitmap_free);
  if (bound == nullptr) return cpus;
  if (hwloc_get_cpubind(raw, bound.get(), HWLOC_CPUBIND_THREAD) != 0) {
    hwloc_bitmap_copy(bound.get(), hwloc_topology_get_allowed_cpuset(raw));
  }
  for (int i = hwloc_bitmap_first(bound.get()); i >= 0; i = hwloc_bitmap_next(bound.get(), i)) cpus.push_back(i);
  return cpus;
}

}  // namespace ddp
