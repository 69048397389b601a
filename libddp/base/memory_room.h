// SPDX-License-Identifier: Apache-2.0
// How much memory is left for this process.
#ifndef LIBDDP_BASE_MEMORY_ROOM_H_
#define LIBDDP_BASE_MEMORY_ROOM_H_

#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ddp {

// If a process touches shared memory that the machine does not have, the kernel's out-of-memory killer ends it. So the
// library compares with this before it reserves memory. Trivially copyable, so that ranks can exchange it.
struct MemoryRoom {
  // What the memory limit of one cgroup leaves.
  struct Limit {
    uint64_t bytes = std::numeric_limits<uint64_t>::max();
    uint64_t id = 0;  // identifies the cgroup on this host; 0: no limit
  };

  uint64_t host = std::numeric_limits<uint64_t>::max();  // bytes available on the host
  // Of the process's cgroup and of those above it, which other processes may share; where there are more limits than
  // this, the tightest.
  std::array<Limit, 8> limits = {};

  // Reads /proc and the cgroups (version 1 or 2). Tests pass a folder as `root`.
  static MemoryRoom Read(const std::string& root = "");
  // The room for an allocation of so many bytes: unlimited for a small one, which is not worth the fraction of a
  // millisecond that Read takes.
  static MemoryRoom For(uint64_t bytes);

  // For this process alone.
  uint64_t bytes() const;
};

// ResourceExhausted if the processes, all on one host, cannot each allocate `bytes`.
absl::Status CheckRoom(absl::Span<const MemoryRoom> processes, uint64_t bytes);

}  // namespace ddp

#endif  // LIBDDP_BASE_MEMORY_ROOM_H_
