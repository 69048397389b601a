// SPDX-License-Identifier: Apache-2.0
// Which ranks an error comes from and is about, for people and in a form that programs can read.
#ifndef LIBDDP_BASE_FAILED_RANKS_H_
#define LIBDDP_BASE_FAILED_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ddp {

// The error with the ranks to blame attached, which ddp::FailedRanks (process_group.h) reads back. The message is left
// as it is.
absl::Status WithFailedRanks(absl::Status error, absl::Span<const int> ranks);

// As text, for an error on its way to another rank: "1,3", or "".
std::string PackFailedRanks(const absl::Status& error);
absl::Status WithPackedFailedRanks(absl::Status error, absl::string_view packed);

// `error` with the rank and the call that it comes from, if its text names no rank yet: "rank 1: FinishBackward: ...".
absl::Status NameRank(int rank, absl::string_view call, absl::Status error);

// `error`, of code that may number ranks in another way than the group with this status: it blames those that `group`
// does.
absl::Status WithRanksOf(const absl::Status& group, const absl::Status& error);

// No group is larger.
inline constexpr int kMaxRanks = 1 << 16;

// An error as plain memory, on its way to another rank. Its ranks are complete; a message that is too long is cut off.
struct PackedError {
  void Pack(const absl::Status& error);
  absl::Status Unpack() const;
  // So many bytes of this hold an error of a group of `ranks`.
  static size_t Bytes(int ranks);

  int32_t code = 0;  // absl::StatusCode
  char message[876] = {};
  uint64_t failed_ranks[kMaxRanks / 64] = {};  // one bit each
};

}  // namespace ddp

#endif  // LIBDDP_BASE_FAILED_RANKS_H_
