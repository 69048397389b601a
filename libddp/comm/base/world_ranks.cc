// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/world_ranks.h"

#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/process_group.h"
#include "libddp/base/failed_ranks.h"

namespace ddp {
namespace {

// The ranks of a group of so many all fit into a message.
constexpr size_t kSmallGroup = 16;

constexpr absl::string_view kOfGroup = " of this group ", kOfWorld = " of the world";

}  // namespace

WorldRanks::WorldRanks(std::vector<int> ranks) {
  bool differ = false;
  for (size_t i = 0; i < ranks.size(); ++i) differ |= ranks[i] != static_cast<int>(i);
  if (differ) ranks_ = std::make_shared<const std::vector<int>>(std::move(ranks));
}

WorldRanks WorldRanks::Part(absl::Span<const int> ranks) const {
  std::vector<int> part;
  part.reserve(ranks.size());
  for (const int r : ranks) part.push_back(of(r));
  return WorldRanks(std::move(part));
}

std::string WorldRanks::NameOf(int rank) const {
  return of(rank) == rank ? absl::StrCat("rank ", rank)
                          : absl::StrCat("rank ", rank, " (rank ", of(rank), kOfWorld, ")");
}

std::string WorldRanks::Note(int rank, absl::Span<const int> others) const {
  if (ranks_ == nullptr) return "";
  std::set<int> here(others.begin(), others.end());
  here.insert(rank);
  if (ranks_->size() <= kSmallGroup) {
    for (size_t r = 0; r < ranks_->size(); ++r) here.insert(static_cast<int>(r));
  }
  std::vector<int> there;
  there.reserve(here.size());
  for (const int r : here) there.push_back(of(r));
  const bool one = here.size() == 1;
  return absl::StrCat(one ? "; rank " : "; ranks ", absl::StrJoin(here, ", "), kOfGroup,
                      one ? "is rank " : "are ranks ", absl::StrJoin(there, ", "), kOfWorld);
}

absl::Status WorldRanks::DestroyedError(int rank) const {
  return WithFailedRanks(
      absl::AbortedError(absl::StrCat(NameOf(rank), ": the process group was destroyed with operations pending")),
      {rank});
}

absl::Status WorldRanks::Named(const absl::Status& error, int rank) const {
  if (error.ok() || ranks_ == nullptr) return error;
  if (absl::StrContains(error.message(), kOfGroup) && absl::StrContains(error.message(), kOfWorld)) return error;
  return WithPackedFailedRanks(
      absl::Status(error.code(), absl::StrCat(error.message(), Note(rank, FailedRanks(error)))),
      PackFailedRanks(error));
}

}  // namespace ddp
