// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/host/data_map.h"

#include <algorithm>

#include "libddp/base/round.h"

namespace ddp {

using Kind = OperationKey::Kind;

DataMap::DataMap(const OperationKey& key, size_t count, absl::Span<const size_t> begins, int ranks)
    : kind_(key.kind),
      root_(key.root),
      count_(count),
      ranks_(static_cast<size_t>(ranks)),
      part_(kind_ == Kind::kAllReduce ? RoundUp(CeilDiv(count, ranks_), kShareAlign) : count / ranks_),
      begins_(begins) {}

// An all-reduce is cut into one share for each rank.
Piece DataMap::Share(int rank) const {
  const size_t begin = std::min(count_, part_ * static_cast<size_t>(rank));
  return {begin, begin, std::min(part_, count_ - begin)};
}

Piece DataMap::Reduced(int owner) const {
  if (kind_ == Kind::kAllReduce) return Share(owner);
  if (kind_ != Kind::kReduceScatter) return {};
  return {part_ * static_cast<size_t>(owner), 0, part_};
}

Piece DataMap::Moved(int source, int target) const {
  const size_t s = static_cast<size_t>(source), t = static_cast<size_t>(target);
  switch (kind_) {
    case Kind::kAllReduce:
      return source == target ? Piece{} : Share(source);
    case Kind::kAllGather:
      return {0, count_ * s, count_};
    case Kind::kAllGatherV:
      return {0, begins_[s], begins_[s + 1] - begins_[s]};
    case Kind::kAllToAll:
      return {part_ * t, part_ * s, part_};
    case Kind::kBroadcast:
      return source == root_ && target != root_ ? Piece{0, 0, count_} : Piece{};
    default:
      return {};
  }
}

size_t DataMap::ResultElements(int rank) const {
  switch (kind_) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      return Reduced(rank).elements;
    case Kind::kAllGather:
      return count_ * ranks_;
    case Kind::kAllGatherV:
    case Kind::kAllToAll:
      return count_;
    case Kind::kBroadcast:
      return rank == root_ ? 0 : count_;
    default:
      return 0;
  }
}

}  // namespace ddp
