// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/memory/share_segment.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace ddp {
namespace {

// The leader creates the segment and the others open it, in two exchanges. Sets `automatic`, on all ranks alike, if a
// rank could not open a segment whose kind its leader chose automatically.
absl::StatusOr<std::shared_ptr<SharedSegment>> MakeAndOpen(const SegmentShare& share,
                                                           const absl::StatusOr<SharedSegment::Kind>& kind,
                                                           const ExchangeNotes& exchange, bool* automatic) {
  std::shared_ptr<SharedSegment> segment;
  Note mine;
  if (!share.ready.ok()) {
    mine = Note(share.ready, "");
  } else if (share.leader == share.rank) {
    absl::StatusOr<std::shared_ptr<SharedSegment>> made =
        kind.ok() ? SharedSegment::Create(share.bytes, *kind) : kind.status();
    mine = Note(made.status(), made.ok() ? (*made)->handle() : "");
    mine.automatic = made.ok() && *kind == SharedSegment::Kind::kAuto;
    if (made.ok()) segment = *std::move(made);
  }
  absl::StatusOr<std::vector<Note>> notes = exchange(mine);
  if (!notes.ok()) return notes.status();
  if (absl::Status s = FirstError(*notes); !s.ok()) return s;

  absl::Status opened;
  if (share.leader >= 0 && segment == nullptr) {
    absl::StatusOr<std::shared_ptr<SharedSegment>> theirs =
        SharedSegment::Open((*notes)[static_cast<size_t>(share.leader)].text);
    opened = theirs.status();
    if (theirs.ok()) segment = *std::move(theirs);
  }
  if (segment != nullptr && share.place >= 0) segment->Mark(share.place);
  const absl::StatusOr<std::vector<Note>> outcomes = exchange(Note(opened, ""));
  if (!outcomes.ok()) return outcomes.status();
  const absl::Status first = FirstError(*outcomes);
  *automatic = absl::IsUnavailable(first) &&
               std::any_of(notes->begin(), notes->end(), [](const Note& note) { return note.automatic; });
  if (!first.ok()) return first;
  return segment;
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedSegment>> ShareSegment(const SegmentShare& share, const ExchangeNotes& exchange) {
  const absl::StatusOr<SharedSegment::Kind> kind = SharedSegment::KindFromEnv();
  bool automatic = false;
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment = MakeAndOpen(share, kind, exchange, &automatic);
  if (automatic) {
    const bool chosen = kind.ok() && *kind != SharedSegment::Kind::kAuto;
    segment = MakeAndOpen(share, chosen ? *kind : SharedSegment::Kind::kPosix, exchange, &automatic);
  }
  if (!segment.ok()) return segment.status();
  absl::Status reserved;
  if (*segment != nullptr) {
    (*segment)->Seal();
    if (share.own_bytes > 0) reserved = (*segment)->ReserveHugePages(share.own_offset, share.own_bytes);
  }
  const absl::StatusOr<std::vector<Note>> outcomes = exchange(Note(reserved, ""));
  if (!outcomes.ok()) return outcomes.status();
  if (absl::Status s = FirstError(*outcomes); !s.ok()) return s;
  return segment;
}

SegmentShare ControlShare(int rank, const std::vector<int>& ranks, size_t bytes) {
  const int place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  return {.rank = rank, .leader = ranks[0], .bytes = bytes, .place = place, .own_bytes = place == 0 ? bytes : 0};
}

ExchangeNotes ExchangeOver(ProcessGroup& group) {
  return [&group](const Note& mine) { return Exchange(group, mine); };
}

ExchangeNotes ExchangeOver(Rendezvous& rendezvous, absl::Time deadline) {
  return [&rendezvous, deadline](const Note& mine) -> absl::StatusOr<std::vector<Note>> {
    absl::StatusOr<std::vector<std::string>> texts = rendezvous.AllGather(
        absl::string_view(reinterpret_cast<const char*>(&mine), sizeof mine), "opening of the shared memory", deadline);
    if (!texts.ok()) return texts.status();
    std::vector<Note> notes(texts->size());
    for (size_t r = 0; r < notes.size(); ++r) {
      std::memcpy(&notes[r], (*texts)[r].data(), std::min((*texts)[r].size(), sizeof(Note)));
    }
    return notes;
  };
}

}  // namespace ddp
