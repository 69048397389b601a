// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/failed_ranks.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ddp/process_group.h"

namespace ddp {
namespace {

constexpr absl::string_view kPayload = "libddp/failed_ranks";

}  // namespace

absl::Status WithFailedRanks(absl::Status error, absl::Span<const int> ranks) {
  return WithPackedFailedRanks(std::move(error), absl::StrJoin(ranks, ","));
}

std::string PackFailedRanks(const absl::Status& error) {
  return std::string(error.GetPayload(kPayload).value_or(absl::Cord()));
}

absl::Status WithPackedFailedRanks(absl::Status error, absl::string_view packed) {
  if (!packed.empty()) error.SetPayload(kPayload, absl::Cord(packed));
  return error;
}

absl::Status WithRanksOf(const absl::Status& group, const absl::Status& error) {
  return WithPackedFailedRanks(absl::Status(error.code(), error.message()), PackFailedRanks(group));
}

absl::Status NameRank(int rank, absl::string_view call, absl::Status error) {
  if (error.ok() || absl::StartsWith(error.message(), "rank")) return error;
  return WithPackedFailedRanks(
      absl::Status(error.code(), absl::StrCat("rank ", rank, ": ", call, ": ", error.message())),
      PackFailedRanks(error));
}

void PackedError::Pack(const absl::Status& error) {
  *this = PackedError();
  code = static_cast<int32_t>(error.code());
  const absl::string_view text = error.message().substr(0, sizeof message - 1);
  std::copy(text.begin(), text.end(), message);
  for (const int rank : FailedRanks(error)) {
    if (rank >= 0 && rank < kMaxRanks) failed_ranks[rank / 64] |= uint64_t{1} << (rank % 64);
  }
}

absl::Status PackedError::Unpack() const {
  std::vector<int> ranks;
  for (int word = 0; word < kMaxRanks / 64; ++word) {
    for (uint64_t bits = failed_ranks[word]; bits != 0; bits &= bits - 1) {
      ranks.push_back(word * 64 + std::countr_zero(bits));
    }
  }
  return WithFailedRanks(absl::Status(static_cast<absl::StatusCode>(code), message), ranks);
}

size_t PackedError::Bytes(int ranks) {
  return offsetof(PackedError, failed_ranks) + static_cast<size_t>((ranks + 63) / 64) * sizeof(uint64_t);
}

std::vector<int> FailedRanks(const absl::Status& error) {
  std::vector<int> ranks;
  for (absl::string_view text : absl::StrSplit(PackFailedRanks(error), ',', absl::SkipEmpty())) {
    int rank = 0;
    if (absl::SimpleAtoi(text, &rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace ddp
