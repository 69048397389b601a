// Which memory all ranks of a group can reach, and where this process sees each rank's part of it.
#ifndef LIBDDP_COMM_ALLOCATION_TABLE_H_
#define LIBDDP_COMM_ALLOCATION_TABLE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "libddp/comm/control_block.h"
#include "libddp/comm/shared_segment.h"

namespace ddp {

// One call of Allocate or Register: a segment with one part per rank. Speaks of the memory but does not own it.
struct SharedAllocation {
  uint64_t id = 0;
  absl::InlinedVector<char*, 4> parts;  // by rank, where this process sees them
  size_t bytes = 0;                     // of one part
  size_t own_offset = 0;                // of this rank's part in the segment
  std::weak_ptr<SharedSegment> segment;
  std::shared_ptr<const std::atomic<bool>> freed;  // by this rank's user: the addresses may mean something else by now
  std::weak_ptr<char> view;                        // of this rank's part, see SharedSegment::ViewAgain; may be none

  char* part(int rank) const { return parts[static_cast<size_t>(rank)]; }
  bool gone() const { return freed->load(std::memory_order_acquire); }
};

// Not thread-safe, but for the freed flags.
class AllocationTable {
 public:
  // Numbers are below `numbers`; a test has few.
  explicit AllocationTable(uint64_t numbers = Address::kAllocations) : numbers_(numbers) {}

  uint64_t numbers() const { return numbers_; }

  // How far after `from`, around the end, lies the first number that no allocation has which is in use here; numbers()
  // if there is none.
  uint64_t ToFree(uint64_t from) const {
    std::vector<uint64_t> used;
    for (const SharedAllocation& a : live_) {
      if (!a.gone()) used.push_back((a.id + numbers_ - from) % numbers_);
    }
    std::sort(used.begin(), used.end());
    uint64_t free = 0;
    while (free < used.size() && used[free] == free) ++free;
    return free;
  }

  void Add(SharedAllocation allocation) {
    live_.erase(std::remove_if(live_.begin(), live_.end(), [](const SharedAllocation& a) { return a.gone(); }),
                live_.end());
    live_.push_back(std::move(allocation));
  }

  // The address of [data, data + bytes), if it lies in this rank's part of an allocation.
  bool Find(int rank, const char* data, size_t bytes, uint64_t* address) const {
    for (const SharedAllocation& a : live_) {
      const char* const part = a.part(rank);
      if (data < part || data + bytes > part + a.bytes || a.gone()) continue;
      *address = Address::Make(a.id, static_cast<uint64_t>(data - part));
      return true;
    }
    return false;
  }

  // Where this process sees what `rank` calls `address`; null if it is not (or no longer) known here. `keep`, if given,
  // gets what holds it there.
  char* Resolve(int rank, uint64_t address, size_t bytes,
                std::vector<std::shared_ptr<SharedSegment>>* keep = nullptr) const {
    for (const SharedAllocation& a : live_) {
      if (a.id != Address::Allocation(address)) continue;
      if (Address::Offset(address) + bytes > a.bytes || a.gone()) return nullptr;
      if (keep != nullptr) {
        keep->push_back(a.segment.lock());
        if (keep->back() == nullptr) return nullptr;
      }
      return a.part(rank) + Address::Offset(address);
    }
    return nullptr;
  }

  // Where [data, data + bytes), of this rank's part of an allocation, has its second view; null if there is none.
  // `keep` gets what holds it there.
  char* View(int rank, const char* data, size_t bytes, std::vector<std::shared_ptr<char>>* keep) const {
    for (const SharedAllocation& a : live_) {
      const char* const part = a.part(rank);
      if (data < part || data + bytes > part + a.bytes || a.gone()) continue;
      const std::shared_ptr<char> view = a.view.lock();
      if (view != nullptr && (keep->empty() || keep->back() != view)) keep->push_back(view);
      return view == nullptr ? nullptr : view.get() + (data - part);
    }
    return nullptr;
  }

  // Where [data, data + bytes) lies in this rank's part of an allocation, the process gets memory of its own there.
  absl::Status MakePrivate(int rank, char* data, size_t bytes) const {
    for (const SharedAllocation& a : live_) {
      const size_t offset = static_cast<size_t>(data - a.part(rank));
      const std::shared_ptr<SharedSegment> segment = a.segment.lock();
      if (data < a.part(rank) || offset + bytes > a.bytes || a.gone() || segment == nullptr) continue;
      return segment->MakePrivate(data, a.own_offset + offset, bytes);
    }
    return absl::OkStatus();
  }

 private:
  const uint64_t numbers_;
  std::vector<SharedAllocation> live_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_ALLOCATION_TABLE_H_
