#include "libddp/comm/group_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/comm/backing.h"
#include "libddp/comm/exchange.h"

namespace ddp {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Buffers a whole multiple of 256 MiB apart are up to eleven times slower on some processors (the hash by which the
// first-level cache finds a line repeats there); three pages more avoid it.
size_t StrideFor(size_t bytes) { return (bytes + 4095) / 4096 * 4096 + 3 * 4096; }

}  // namespace

absl::StatusOr<GroupMemory::Parts> GroupMemory::MakeParts(size_t bytes, uint64_t address) {
  const size_t place = OwnPlace();
  const bool aligned = address != 0 && bytes >= kHugePage;
  const size_t stride = StrideFor(bytes);
  const size_t step = stride + (aligned ? kHugePage : 0);

  // The node's first rank makes the segment; all learn where it is, and that all ask for the same.
  Parts parts;
  Note mine;
  if (place == 0) {
    absl::StatusOr<std::shared_ptr<SharedSegment>> made = SharedSegment::Create(step * node_.size());
    mine = Note(made.status(), made.ok() ? (*made)->handle() : "");
    if (made.ok()) parts.segment = *std::move(made);
  }
  mine.bytes = bytes;
  mine.address = address;
  absl::StatusOr<std::vector<Note>> notes = Exchange(group_, mine);
  if (!notes.ok()) return notes.status();
  for (size_t r = 1; r < notes->size(); ++r) {
    const Note& note = (*notes)[r];
    if (note.bytes == (*notes)[0].bytes) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("ranks disagree about the size of an allocation: rank 0 asks for ", (*notes)[0].bytes,
                     " bytes, rank ", r, " for ", note.bytes));
  }
  if (absl::Status s = FirstError(*notes); !s.ok()) return s;
  for (const int r : node_) {
    const size_t begin = step * parts.offsets.size();
    parts.offsets.push_back(begin + (aligned ? ((*notes)[static_cast<size_t>(r)].address - begin) % kHugePage : 0));
  }

  // Each rank puts memory behind its own part, which places it near that rank.
  absl::Status opened;
  if (parts.segment == nullptr) {
    absl::StatusOr<std::shared_ptr<SharedSegment>> theirs =
        SharedSegment::Open((*notes)[static_cast<size_t>(node_[0])].text);
    opened = theirs.status();
    if (theirs.ok()) parts.segment = *std::move(theirs);
  }
  if (opened.ok()) opened = parts.segment->Reserve(parts.offsets[place], stride);
  if (absl::Status s = Agree(group_, opened); !s.ok()) return s;
  parts.segment->Seal();
  parts.segment->Prepare(parts.offsets[place], stride);
  return parts;
}

void GroupMemory::Add(const Parts& parts, Backing* backing, size_t bytes) {
  const size_t place = OwnPlace(), own = parts.offsets[place];
  SharedAllocation allocation{next_id_++, {}, bytes, own, parts.segment, backing->freed(), {}};
  for (const size_t offset : parts.offsets) allocation.parts.push_back(parts.segment->data() + offset);
  allocation.parts[place] = backing->data();
  // Where there is none the memory is as good, but slower.
  if (absl::StatusOr<std::shared_ptr<char>> view; viewed_ && (view = parts.segment->ViewAgain(own, bytes)).ok()) {
    allocation.view = *view;
    backing->KeepView(*std::move(view));
  }
  for (Engine* engine : engines_) engine->AddAllocation(allocation);
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
  Add(*parts, Backing::Of(allocation), bytes);
  list_.Add(allocation);
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
  Add(*parts, backing, memory.bytes());
  list_.Add(memory);
  return absl::OkStatus();
}

}  // namespace ddp
