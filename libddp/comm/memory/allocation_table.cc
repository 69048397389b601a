// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/memory/allocation_table.h"

#include <algorithm>
#include <utility>

namespace ddp {

uint64_t AllocationTable::ToFree(uint64_t from) const {
  std::vector<uint64_t> used;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const SharedAllocation& a : live_) {
    if (!a.gone()) used.push_back((a.id + numbers_ - from) % numbers_);
  }
  std::sort(used.begin(), used.end());
  uint64_t free = 0;
  while (free < used.size() && used[free] == free) ++free;
  return free;
}

void AllocationTable::Add(SharedAllocation allocation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(live_, [](const SharedAllocation& a) { return a.owner.expired(); });
  live_.push_back(std::move(allocation));
  live_.back().number = next_number_++;
}

void AllocationTable::Add(const Allocation& memory) {
  Add({.parts = {static_cast<char*>(memory.data())},
       .bytes = memory.bytes(),
       .owner = memory.owner(),
       .device = memory.device()});
}

std::optional<AllocatedRange> AllocationTable::Find(const void* data, size_t bytes) const {
  const char* const begin = static_cast<const char*>(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const SharedAllocation& a : live_) {
    const char* const part = a.part(rank_);
    if (begin < part || begin + bytes > part + a.bytes) continue;
    std::shared_ptr<void> owner = a.owner.lock();
    if (owner == nullptr) continue;
    return AllocatedRange{Allocation(std::move(owner), a.bytes, a.device), a.number, static_cast<size_t>(begin - part)};
  }
  return std::nullopt;
}

const SharedAllocation* AllocationTable::Holding(const char* data, size_t bytes) const {
  const auto holds = [&](const SharedAllocation& a) {
    const char* const part = a.part(rank_);
    return data >= part && data + bytes <= part + a.bytes && !a.gone();
  };
  const auto found = std::find_if(live_.begin(), live_.end(), holds);
  return found == live_.end() ? nullptr : &*found;
}

bool AllocationTable::Lookup::Locate(const RangeList& list, ListedRange* entries) const {
  return list.ForEach([&](char* data, size_t bytes) {
    const SharedAllocation* const a = table_.Holding(data, bytes);
    if (a != nullptr) *entries++ = {Address::Make(a->id, static_cast<uint64_t>(data - a->part(table_.rank_))), bytes};
    return a != nullptr;
  });
}

bool AllocationTable::Lookup::IsShared(const RangeList& list) const {
  return list.ForEach([&](char* data, size_t bytes) { return table_.Holding(data, bytes) != nullptr; });
}

char* AllocationTable::Lookup::Resolve(int rank, uint64_t address, size_t bytes,
                                       std::vector<std::shared_ptr<SharedSegment>>* keep) const {
  const auto is_it = [&](const SharedAllocation& a) { return a.id == Address::Allocation(address) && !a.gone(); };
  const auto a = std::find_if(table_.live_.begin(), table_.live_.end(), is_it);
  if (a == table_.live_.end() || Address::Offset(address) + bytes > a->bytes) return nullptr;
  if (keep != nullptr) {
    keep->push_back(a->segment.lock());
    if (keep->back() == nullptr) return nullptr;
  }
  return a->part(rank) + Address::Offset(address);
}

char* AllocationTable::View(const char* data, size_t bytes, std::vector<std::shared_ptr<char>>* keep) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const SharedAllocation* const a = Holding(data, bytes);
  if (a == nullptr) return nullptr;
  const std::shared_ptr<char> view = a->view.lock();
  if (view == nullptr) return nullptr;
  if (keep->empty() || keep->back() != view) keep->push_back(view);
  return view.get() + (data - a->part(rank_));
}

absl::Status AllocationTable::MakePrivate(char* data, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const SharedAllocation* const a = Holding(data, bytes);
  const std::shared_ptr<SharedSegment> segment = a == nullptr ? nullptr : a->segment.lock();
  if (segment == nullptr) return absl::OkStatus();
  return segment->MakePrivate(data, a->own_offset + static_cast<size_t>(data - a->part(rank_)), bytes);
}

}  // namespace ddp
