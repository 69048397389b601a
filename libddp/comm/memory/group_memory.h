// SPDX-License-Identifier: Apache-2.0
// Memory of a hierarchical group, which its ranks reduce without copying it.
#ifndef LIBDDP_COMM_MEMORY_GROUP_MEMORY_H_
#define LIBDDP_COMM_MEMORY_GROUP_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"
#include "libddp/base/memory_room.h"
#include "libddp/base/page.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/memory/backing.h"
#include "libddp/comm/memory/shared_segment.h"

namespace ddp {

// How far apart the parts of the ranks lie, each of `bytes` bytes: whole pages. A size that no memory has stays as it
// is, for CheckRoom to refuse.
constexpr size_t StrideFor(size_t bytes, size_t page) {
  if (bytes > std::numeric_limits<size_t>::max() / 2) return bytes;
  // Buffers a whole multiple of 256 MiB apart are up to eleven times slower on some processors (the hash by which the
  // first-level cache finds a line repeats there); 12 KiB more avoid it.
  return RoundUp(bytes, page) + RoundUp(3 * 4096, page);
}

// ProcessGroup::Allocate and Register. Used by one thread at a time.
class GroupMemory {
 public:
  // `node`: the ranks of the group that share memory with this one, itself among them, ascending; every rank of the
  // group has such a list. The memory is added to `table`, which is over these ranks.
  // `viewed`: each rank's part of the memory gets a second view.
  GroupMemory(ProcessGroup* group, std::vector<int> node, AllocationTable* table, bool viewed)
      : group_(*group), node_(std::move(node)), table_(*table), viewed_(viewed) {}

  absl::StatusOr<Allocation> Allocate(size_t bytes);
  absl::Status Register(const Allocation& memory);

 private:
  // One segment with a part for every rank of the node.
  struct Parts {
    std::shared_ptr<SharedSegment> segment;
    std::vector<size_t> offsets;  // by place in node_
    uint64_t id = 0;              // see Address
  };
  // What ranks tell each other before they make one.
  struct Wish {
    uint64_t bytes, address;
    uint64_t to_free;  // see AllocationTable
    MemoryRoom room;
  };

  // Collective. Where `address` is not 0, this rank's part begins as far into a huge page as `address` does.
  absl::StatusOr<Parts> MakeParts(size_t bytes, uint64_t address);
  absl::StatusOr<std::vector<Wish>> AgreeOnNumber(Wish mine, uint64_t* number);
  void Add(const Parts& parts, const Allocation& memory);

  size_t OwnPlace() const;

  ProcessGroup& group_;
  const std::vector<int> node_;
  AllocationTable& table_;
  const bool viewed_;
  uint64_t next_id_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MEMORY_GROUP_MEMORY_H_
