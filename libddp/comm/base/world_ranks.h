// SPDX-License-Identifier: Apache-2.0
// Which ranks of the world the ranks of a group are: errors of a part of the world name both.
#ifndef LIBDDP_COMM_BASE_WORLD_RANKS_H_
#define LIBDDP_COMM_BASE_WORLD_RANKS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ddp {

class WorldRanks {
 public:
  // Of the world itself, or of a group whose ranks have the same numbers there.
  WorldRanks() = default;
  // Rank i of the group is rank ranks[i] of the world.
  explicit WorldRanks(std::vector<int> ranks);

  int of(int rank) const { return ranks_ == nullptr ? rank : (*ranks_)[static_cast<size_t>(rank)]; }
  // Of a group of these ranks of this group.
  WorldRanks Part(absl::Span<const int> ranks) const;

  // "rank 1", or "rank 1 (rank 5 of the world)" where the numbers differ.
  std::string NameOf(int rank) const;
  // "; ranks 0, 1 of this group are ranks 4, 5 of the world", of all ranks of a small group, else of `rank` and
  // `others`. Empty where the numbers are the same.
  std::string Note(int rank, absl::Span<const int> others) const;
  // `error`, which `rank` has found, with the note of it and of its failed ranks, unless it has one.
  absl::Status Named(const absl::Status& error, int rank) const;
  // The failure of a group that `rank` leaves with something pending.
  absl::Status DestroyedError(int rank) const;

 private:
  std::shared_ptr<const std::vector<int>> ranks_;  // null: the same numbers
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_WORLD_RANKS_H_
