// Short messages between the ranks of a group, by its own all-gather: how ranks agree on what is not data.
#ifndef LIBDDP_COMM_EXCHANGE_H_
#define LIBDDP_COMM_EXCHANGE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"

namespace ddp {

// A status, or a short text, and two numbers, in a form that travels.
struct Note {
  int32_t code = 0;
  uint64_t bytes = 0;
  uint64_t address = 0;
  char text[228] = {};

  Note() = default;
  Note(const absl::Status& status, absl::string_view ok_text) : code(static_cast<int32_t>(status.code())) {
    const absl::string_view source = status.ok() ? ok_text : status.message();
    std::memcpy(text, source.data(), std::min(source.size(), sizeof text - 1));
  }
  absl::Status status(size_t rank) const {
    if (code == 0) return absl::OkStatus();
    return absl::Status(static_cast<absl::StatusCode>(code), absl::StrCat("rank ", rank, ": ", text));
  }
};

// What everybody gives, in rank order. Collective; fails as the group does.
template <typename T>
absl::StatusOr<std::vector<T>> Exchange(ProcessGroup& group, T mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<size_t>(group.size()));
  const Buffer in{&mine, sizeof mine, DType::kUInt8, Device{}};
  const Buffer out{all.data(), sizeof mine * all.size(), DType::kUInt8, Device{}};
  absl::StatusOr<Work> work = group.AllGather({&in, 1}, {&out, 1});
  if (!work.ok()) return work.status();
  if (absl::Status s = work->Wait(); !s.ok()) return s;
  return all;
}

inline absl::Status FirstError(const std::vector<Note>& notes) {
  for (size_t r = 0; r < notes.size(); ++r) {
    if (absl::Status s = notes[r].status(r); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// Exchanges outcomes and returns the first that is an error. Collective.
inline absl::Status Agree(ProcessGroup& group, const absl::Status& mine) {
  absl::StatusOr<std::vector<Note>> notes = Exchange(group, Note(mine, ""));
  return notes.ok() ? FirstError(*notes) : notes.status();
}

}  // namespace ddp

#endif  // LIBDDP_COMM_EXCHANGE_H_
