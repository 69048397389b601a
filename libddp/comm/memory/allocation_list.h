// What a group has allocated or registered.
#ifndef LIBDDP_COMM_MEMORY_ALLOCATION_LIST_H_
#define LIBDDP_COMM_MEMORY_ALLOCATION_LIST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ddp/process_group.h"

namespace ddp {

// ProcessGroup::Find. Does not keep the memory alive. Thread-safe.
class AllocationList {
 public:
  // All ranks add their allocations in the same order, which is what makes the numbers equal.
  void Add(const Allocation& memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(std::remove_if(live_.begin(), live_.end(), [](const Entry& e) { return e.owner.expired(); }),
                live_.end());
    live_.push_back(
        {memory.owner(), static_cast<const char*>(memory.data()), memory.bytes(), memory.device(), next_++});
  }

  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const {
    const char* const begin = static_cast<const char*>(data);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Entry& e : live_) {
      if (begin < e.data || begin + bytes > e.data + e.bytes) continue;
      std::shared_ptr<void> owner = e.owner.lock();
      if (owner == nullptr) continue;  // the addresses may be another allocation's by now
      return AllocatedRange{Allocation(std::move(owner), e.bytes, e.device), e.number,
                            static_cast<size_t>(begin - e.data)};
    }
    return std::nullopt;
  }

 private:
  struct Entry {
    std::weak_ptr<void> owner;
    const char* data;
    size_t bytes;
    Device device;
    uint64_t number;
  };

  mutable std::mutex mutex_;
  std::vector<Entry> live_;
  uint64_t next_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MEMORY_ALLOCATION_LIST_H_
