#include "libddp/comm/group_memory.h"

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
  const size_t size = static_cast<size_t>(group_.size()), rank = static_cast<size_t>(group_.rank());
  const bool aligned = address != 0 && bytes >= kHugePage;
  const size_t stride = StrideFor(bytes);
  const size_t step = stride + (aligned ? kHugePage : 0);

  // Rank 0 makes the segment; all learn where it is, and that all ask for the same.
  Parts parts;
  Note mine;
  if (rank == 0) {
    absl::StatusOr<std::shared_ptr<SharedSegment>> made = SharedSegment::Create(step * size);
    mine = Note(made.status(), made.ok() ? (*made)->handle() : "");
    if (made.ok()) parts.segment = *std::move(made);
  }
  mine.bytes = bytes;
  mine.address = address;
  absl::StatusOr<std::vector<Note>> notes = Exchange(group_, mine);
  if (!notes.ok()) return notes.status();
  for (size_t r = 0; r < size; ++r) {
    const Note& note = (*notes)[r];
    if (note.bytes != (*notes)[0].bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("ranks disagree about the size of an allocation: rank 0 asks for ", (*notes)[0].bytes,
                       " bytes, rank ", r, " for ", note.bytes));
    }
    const size_t begin = step * r;
    parts.offsets.push_back(begin + (aligned ? (note.address - begin) % kHugePage : 0));
  }
  if (absl::Status s = (*notes)[0].status(0); !s.ok()) return s;

  // Each rank puts memory behind its own part, which places it near that rank.
  absl::Status opened;
  if (parts.segment == nullptr) {
    absl::StatusOr<std::shared_ptr<SharedSegment>> theirs = SharedSegment::Open((*notes)[0].text);
    opened = theirs.status();
    if (theirs.ok()) parts.segment = *std::move(theirs);
  }
  if (opened.ok()) opened = parts.segment->Reserve(parts.offsets[rank], stride);
  if (absl::Status s = Agree(group_, opened); !s.ok()) return s;
  parts.segment->Seal();
  parts.segment->Prepare(parts.offsets[rank], stride);
  return parts;
}

void GroupMemory::Add(const Parts& parts, size_t bytes, char* own, std::shared_ptr<const std::atomic<bool>> freed) {
  const size_t rank = static_cast<size_t>(group_.rank());
  SharedAllocation allocation{next_id_++, {}, bytes, parts.offsets[rank], parts.segment, std::move(freed)};
  for (const size_t offset : parts.offsets) allocation.parts.push_back(parts.segment->data() + offset);
  allocation.parts[rank] = own;
  engine_.AddAllocation(std::move(allocation));
}

absl::StatusOr<Allocation> GroupMemory::Allocate(size_t bytes) {
  absl::StatusOr<Parts> parts = MakeParts(bytes, 0);
  if (!parts.ok()) return parts.status();
  if (absl::Status s = Agree(group_, absl::OkStatus()); !s.ok()) return s;
  const std::shared_ptr<SharedSegment>& segment = parts->segment;
  segment->Prepare(0, segment->bytes());  // page tables for the peers' parts
  char* const own = segment->data() + parts->offsets[static_cast<size_t>(group_.rank())];
  Allocation allocation = Backing::Make(own, bytes, segment, segment);
  Add(*parts, bytes, own, Backing::Of(allocation)->freed());
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
  const absl::Status moved = backing->MoveTo(parts->segment, parts->offsets[static_cast<size_t>(group_.rank())]);
  if (absl::Status s = Agree(group_, moved); !s.ok()) return s;
  parts->segment->Prepare(0, parts->segment->bytes());
  Add(*parts, memory.bytes(), backing->data(), backing->freed());
  return absl::OkStatus();
}

}  // namespace ddp
