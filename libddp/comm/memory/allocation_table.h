// SPDX-License-Identifier: Apache-2.0
// What a group has allocated or registered, and where this process sees each rank's part of it.
#ifndef LIBDDP_COMM_MEMORY_ALLOCATION_TABLE_H_
#define LIBDDP_COMM_MEMORY_ALLOCATION_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "ddp/process_group.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/memory/shared_segment.h"

namespace ddp {

// A place in memory that the whole group can reach: an allocation number, below kAllocations, and an offset in it.
struct Address {
  static constexpr int kOffsetBits = 44;
  static constexpr uint64_t kAllocations = uint64_t{1} << (64 - kOffsetBits);
  static uint64_t Make(uint64_t allocation, uint64_t offset) { return allocation << kOffsetBits | offset; }
  static uint64_t Allocation(uint64_t a) { return a >> kOffsetBits; }
  static uint64_t Offset(uint64_t a) { return a & ((uint64_t{1} << kOffsetBits) - 1); }
};

// `address` is an Address, or a rank's own address.
struct ListedRange {
  uint64_t address;
  uint64_t bytes;
};

// One call of Allocate or Register: a segment with one part for each rank. It does not keep the memory alive.
struct SharedAllocation {
  uint64_t id = 0;
  absl::InlinedVector<char*, 4> parts = {};  // by rank, where this process sees them
  size_t bytes = 0;                          // of one part
  std::weak_ptr<void> owner;  // of this rank's part: without one, the addresses may mean something else by now
  Device device = {};
  size_t own_offset = 0;  // of this rank's part in the segment
  std::weak_ptr<SharedSegment> segment = {};
  std::shared_ptr<const std::atomic<bool>> moved = {};  // another group has registered this rank's part; may be null
  std::weak_ptr<char> view = {};  // of this rank's part, see SharedSegment::ViewAgain; may be none
  uint64_t number = 0;            // set by the table: the same on all ranks, never used again

  char* part(int rank) const { return parts[static_cast<size_t>(rank)]; }
  bool gone() const { return owner.expired() || (moved != nullptr && moved->load(std::memory_order_acquire)); }
};

// Thread-safe.
class AllocationTable {
 public:
  // `rank`: this process's place among `parts`. Numbers are below `numbers`; a test has few.
  explicit AllocationTable(int rank, uint64_t numbers = Address::kAllocations) : rank_(rank), numbers_(numbers) {}

  uint64_t numbers() const { return numbers_; }

  // The distance from `from` to the first number that no allocation in use here has, where numbers()'s successor is 0.
  // numbers() if all are in use.
  uint64_t ToFree(uint64_t from) const;
  // All ranks add their allocations in the same order.
  void Add(SharedAllocation allocation);
  // Memory that only this rank reaches, in a table of rank 0.
  void Add(const Allocation& memory);

  // See InternalGroup::Find.
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const;

  // Look-ups that see the table as it is at one time. It keeps out everybody else, so it should be short.
  class Lookup {
   public:
    explicit Lookup(const AllocationTable& table) : table_(table), lock_(table.mutex_) {}

    // Writes the Address of each range of this rank's memory; false if one lies elsewhere.
    bool Locate(const RangeList& list, ListedRange* entries) const;
    bool IsShared(const RangeList& list) const;  // whether Locate would find all of it

    // Where this process sees what `rank` calls `address`; null if it is not known here, or no longer. Whoever uses it
    // keeps what is added to `keep`.
    char* Resolve(int rank, uint64_t address, size_t bytes,
                  std::vector<std::shared_ptr<SharedSegment>>* keep = nullptr) const;

   private:
    const AllocationTable& table_;
    const std::lock_guard<std::mutex> lock_;
  };

  // The second view of [data, data + bytes), a range of this rank's part of an allocation; null if there is none.
  // Whoever uses it keeps what is added to `keep`.
  char* View(const char* data, size_t bytes, std::vector<std::shared_ptr<char>>* keep) const;

  // Gives the process its own copy of [data, data + bytes), if that is in this rank's part of an allocation: see
  // SharedSegment::MakePrivate.
  absl::Status MakePrivate(char* data, size_t bytes) const;

 private:
  // The allocation in use here whose part of this rank holds [data, data + bytes), or null.
  const SharedAllocation* Holding(const char* data, size_t bytes) const;

  const int rank_;
  const uint64_t numbers_;
  mutable std::mutex mutex_;
  std::vector<SharedAllocation> live_;
  uint64_t next_number_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MEMORY_ALLOCATION_TABLE_H_
