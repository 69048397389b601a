// SPDX-License-Identifier: Apache-2.0
// Short messages between the ranks of a group, by its own operations: how ranks agree on what is not data.
#ifndef LIBDDP_COMM_BASE_EXCHANGE_H_
#define LIBDDP_COMM_BASE_EXCHANGE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"

namespace ddp {

// A status, or a short text, in a form that travels.
struct Note {
  int32_t code = 0;
  bool automatic = false;  // see ShareSegment
  char text[1019] = {};

  Note() = default;
  Note(const absl::Status& status, absl::string_view ok_text) : code(static_cast<int32_t>(status.code())) {
    const absl::string_view source = status.ok() ? ok_text : status.message();
    std::memcpy(text, source.data(), std::min(source.size(), sizeof text - 1));
  }
  absl::Status status(size_t rank) const {
    if (code == 0) return absl::OkStatus();
    const bool named = absl::StartsWith(text, "rank ");  // by the ranks' agreement about a part of this
    return absl::Status(static_cast<absl::StatusCode>(code), named ? text : absl::StrCat("rank ", rank, ": ", text));
  }
};

// `values` as the bytes that operations move.
template <typename T>
Buffer Bytes(absl::Span<T> values) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {values.data(), values.size() * sizeof(T), DType::kUInt8, Device{}};
}

// all[r * mine.size() + i] = rank r's mine[i]. Collective, and so is what follows; all fail as the group does.
template <typename T>
Work StartGather(ProcessGroup& group, absl::Span<T> mine, absl::Span<T> all) {
  return group.AllGather(Bytes(mine), Bytes(all));
}

// What everybody gives, in rank order.
template <typename T>
absl::StatusOr<std::vector<T>> Exchange(ProcessGroup& group, T mine) {
  std::vector<T> all(static_cast<size_t>(group.size()));
  if (absl::Status s = StartGather<T>(group, {&mine, 1}, absl::MakeSpan(all)).Wait(); !s.ok()) return s;
  return all;
}

template <typename T>
absl::Status BroadcastValues(ProcessGroup& group, absl::Span<T> values, int root) {
  return group.Broadcast(Bytes(values), root).Wait();
}

inline absl::Status FirstError(const std::vector<Note>& notes) {
  for (size_t r = 0; r < notes.size(); ++r) {
    if (absl::Status s = notes[r].status(r); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// OK if all ranks say OK; else the first error, by rank, with that rank's number, on every rank. Collective.
inline absl::Status Agree(ProcessGroup& group, const absl::Status& mine) {
  absl::StatusOr<std::vector<Note>> notes = Exchange(group, Note(mine, ""));
  return notes.ok() ? FirstError(*notes) : notes.status();
}

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_EXCHANGE_H_
