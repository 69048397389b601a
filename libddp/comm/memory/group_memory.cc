// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/memory/group_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/memory/backing.h"
#include "libddp/comm/memory/share_segment.h"

namespace ddp {

// Allocation numbers are reused in turn. All ranks skip a number that is still in use on one of them: each proposes its
// next free number, and while the proposals differ, all search again from the farthest one. Usually one exchange.
absl::StatusOr<std::vector<GroupMemory::Wish>> GroupMemory::AgreeOnNumber(Wish mine, uint64_t* number) {
  const uint64_t numbers = table_.numbers();
  for (uint64_t passed = 0; passed < numbers;) {
    mine.to_free = table_.ToFree(next_id_);
    absl::StatusOr<std::vector<Wish>> wishes = Exchange(group_, mine);
    if (!wishes.ok()) return wishes.status();
    uint64_t farthest = 0;
    bool agreed = true;
    for (size_t r = 0; r < wishes->size(); ++r) {
      const Wish &first = (*wishes)[0], &wish = (*wishes)[r];
      if (wish.bytes != first.bytes) {
        return absl::FailedPreconditionError(
            absl::StrCat("ranks disagree about the size of an allocation: rank 0 asks for ", first.bytes,
                         " bytes, rank ", r, " for ", wish.bytes));
      }
      farthest = std::max(farthest, wish.to_free);
      agreed = agreed && wish.to_free == first.to_free;
    }
    passed += farthest;
    next_id_ = (next_id_ + farthest) % numbers;
    if (!agreed || passed >= numbers) continue;
    *number = next_id_;
    next_id_ = (next_id_ + 1) % numbers;
    return wishes;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("a group can have no more than ", numbers, " allocations at a time; free some on all ranks"));
}

absl::StatusOr<GroupMemory::Parts> GroupMemory::MakeParts(size_t bytes, uint64_t address) {
  const size_t place = OwnPlace();
  const bool aligned = address != 0 && bytes >= kHugePage;
  const size_t stride = StrideFor(bytes, PageSize());
  const size_t step = stride + (aligned ? kHugePage : 0);

  Parts parts;
  absl::StatusOr<std::vector<Wish>> wishes = AgreeOnNumber({bytes, address, 0, MemoryRoom::For(step)}, &parts.id);
  if (!wishes.ok()) return wishes.status();
  std::vector<MemoryRoom> rooms;
  for (const int r : node_) {
    const size_t begin = step * parts.offsets.size();
    parts.offsets.push_back(begin + (aligned ? ((*wishes)[static_cast<size_t>(r)].address - begin) % kHugePage : 0));
    rooms.push_back((*wishes)[static_cast<size_t>(r)].room);
  }
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment = ShareSegment({.rank = group_.rank(),
                                                                         .leader = node_[0],
                                                                         .bytes = step * node_.size(),
                                                                         .ready = CheckRoom(rooms, step),
                                                                         .own_offset = parts.offsets[place],
                                                                         .own_bytes = stride},
                                                                        ExchangeOver(group_));
  if (!segment.ok()) return segment.status();
  parts.segment = *std::move(segment);
  parts.segment->Prepare(parts.offsets[place], stride);
  return parts;
}

void GroupMemory::Add(const Parts& parts, const Allocation& memory) {
  Backing* const backing = Backing::Of(memory);
  const size_t place = OwnPlace(), own = parts.offsets[place];
  SharedAllocation allocation{.id = parts.id,
                              .bytes = memory.bytes(),
                              .owner = memory.owner(),
                              .own_offset = own,
                              .segment = parts.segment,
                              .moved = backing->moved()};
  for (const size_t offset : parts.offsets) allocation.parts.push_back(parts.segment->data() + offset);
  allocation.parts[place] = backing->data();
  // Where there is none the memory is as good, but slower.
  if (absl::StatusOr<std::shared_ptr<char>> view;
      viewed_ && (view = parts.segment->ViewAgain(own, memory.bytes())).ok()) {
    allocation.view = *view;
    backing->KeepView(*std::move(view));
  }
  table_.Add(std::move(allocation));
}

size_t GroupMemory::OwnPlace() const {
  return static_cast<size_t>(std::find(node_.begin(), node_.end(), group_.rank()) - node_.begin());
}

absl::StatusOr<Allocation> GroupMemory::Allocate(size_t bytes) {
  absl::StatusOr<Parts> parts = MakeParts(bytes, 0);
  if (!parts.ok()) return parts.status();
  if (absl::Status s = Agree(group_, absl::OkStatus()); !s.ok()) return s;
  const std::shared_ptr<SharedSegment>& segment = parts->segment;
  segment->Prepare(0, segment->bytes());  // page tables for the peers' parts
  char* const own = segment->data() + parts->offsets[OwnPlace()];
  Allocation allocation = Backing::Make(own, bytes, segment, segment);
  Add(*parts, allocation);
  return allocation;
}

absl::Status GroupMemory::Register(const Allocation& memory) {
  Backing* const backing = Backing::Of(memory);
  if (backing == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", group_.rank(), ": register: not memory from Allocate of a CPU group"));
  }
  absl::StatusOr<Parts> parts = MakeParts(memory.bytes(), reinterpret_cast<uintptr_t>(backing->data()));
  if (!parts.ok()) return parts.status();
  const absl::Status moved = backing->MoveTo(parts->segment, parts->offsets[OwnPlace()]);
  if (absl::Status s = Agree(group_, moved); !s.ok()) return s;
  parts->segment->Prepare(0, parts->segment->bytes());
  Add(*parts, memory);
  return absl::OkStatus();
}

}  // namespace ddp
