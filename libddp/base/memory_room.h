// How much memory is left for this process.
#ifndef LIBDDP_BASE_MEMORY_ROOM_H_
#define LIBDDP_BASE_MEMORY_ROOM_H_

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ddp {

// If a process touches shared memory that the machine does not have, the kernel's out-of-memory killer ends it. So the
// library compares with this before it reserves memory. Trivially copyable, so that ranks can exchange it.
struct MemoryRoom {
  uint64_t host = std::numeric_limits<uint64_t>::max();   // bytes available on the host
  uint64_t limit = std::numeric_limits<uint64_t>::max();  // bytes left below the tightest memory limit of a cgroup
  uint64_t limit_id = 0;                                  // identifies that cgroup on this host; 0: no limit

  // Reads /proc and the cgroups (version 1 or 2). Tests pass a folder as `root`.
  static MemoryRoom Read(const std::string& root = "");
  // The room for an allocation of so many bytes: unlimited for a small one, which is not worth the fraction of a
  // millisecond that Read takes.
  static MemoryRoom For(uint64_t bytes);

  uint64_t bytes() const { return host < limit ? host : limit; }
};

// ResourceExhausted if the processes, all on one host, cannot each allocate `bytes`.
absl::Status CheckRoom(absl::Span<const MemoryRoom> processes, uint64_t bytes);

}  // namespace ddp

#endif  // LIBDDP_BASE_MEMORY_ROOM_H_
