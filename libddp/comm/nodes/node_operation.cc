// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nodes/node_operation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/round.h"
#include "libddp/comm/nodes/node_scratch.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

// Blocks have room for multiples of so many elements, unless they are ranks' own.
constexpr size_t kAlign = 16;
// Above 64 KiB less its own header Open MPI asks the receiver over TCP before it sends. That costs as much as some
// messages of fewer bytes, and as 100 KiB more of one that has to ask anyway; so there are few of these.
constexpr size_t kUnaskedBytes = size_t{60} << 10;
constexpr size_t kMostUnasked = 3;
constexpr size_t kMessageBytes = size_t{512} << 10;

}  // namespace

std::string NodeOperation::Describe() const {
  return absl::StrCat("operation ", sequence, ", ", called.key.Describe(called.count),
                      bucket < 0 ? "" : absl::StrCat(", bucket ", bucket));
}

bool NodeOperation::spreads() const {
  return Is(Kind::kAllReduce) || Is(Kind::kAllGather) || Is(Kind::kAllGatherV) || Is(Kind::kBroadcast);
}

absl::Status NodeOperation::Compare(const NodeHeader& theirs, int their_rank) const {
  const NodeHeader mine = header();
  if (theirs == mine) return absl::OkStatus();
  return rank_ < their_rank ? DisagreementError(sequence, rank_, mine.call, their_rank, theirs.call)
                            : DisagreementError(sequence, their_rank, theirs.call, rank_, mine.call);
}

// Elements of the largest block.
size_t NodeOperation::BlockElements() const {
  if (begins.empty()) return CeilDiv(count, static_cast<size_t>(plan_.blocks()));
  size_t most = 0;
  for (size_t b = 0; b + 1 < begins.size(); ++b) most = std::max(most, begins[b + 1] - begins[b]);
  return most;
}

void NodeOperation::Cut() {
  const size_t elements = BlockElements();
  if (elements == 0) return;
  const size_t size = std::max({in_size(), out_size(), partial_size()}), unasked = kUnaskedBytes / size;
  room_ = CeilDiv(elements, unasked) <= kMostUnasked ? std::min(elements, unasked)
                                                     : CeilDiv(elements, CeilDiv(elements, kMessageBytes / size));
  const auto rounded = [&](size_t n) { return begins.empty() ? RoundUp(n, kAlign) : n; };
  room_ = rounded(room_);
  while (!Fits(room_) && room_ > kAlign) room_ = RoundUp(room_ / 2, kAlign);
  chunks_ = CeilDiv(elements, room_);
  // What travels with the header is copied there: of several chunks the shortest.
  const size_t shortest = rounded(elements - (chunks_ - 1) * room_);
  const bool to_equals = plan_.on_each_node() && layout_.widest() * layout_.nodes() == layout_.size();
  carries_ = to_equals && sizeof(NodeHeader) + room_ * partial_size() <= HeaderStride();
  first_ = carries_ ? shortest : room_;
}

size_t NodeOperation::HeaderStride() const {
  return RoundUp(sizeof(NodeHeader) + kUnaskedBytes / static_cast<size_t>(layout_.nodes() - 1), 64);
}

size_t NodeOperation::Room(size_t chunk) const {
  if (chunk + 1 < chunks_ || room_ == 0) return chunk == 0 ? first_ : room_;
  if (!begins.empty()) return BlockElements() - Before(chunk);
  const size_t blocks = static_cast<size_t>(plan_.blocks());
  return RoundUp(CeilDiv(count - blocks * Before(chunk), blocks), kAlign);
}

NodeOperation::Part NodeOperation::PartOf(int block, size_t chunk) const {
  const size_t b = static_cast<size_t>(block), room = Room(chunk), before = Before(chunk);
  if (begins.empty()) {
    const size_t begin = std::min(count, static_cast<size_t>(plan_.blocks()) * before + b * room);
    return {begin, std::min(room, count - begin)};
  }
  const size_t begin = std::min(begins[b + 1], begins[b] + before);
  return {begin, std::min(room, begins[b + 1] - begin)};
}

NodeOperation::Areas NodeOperation::AreasFor(size_t room, int node) const {
  const size_t slots = static_cast<size_t>(plan_.slots(node)), blocks = static_cast<size_t>(plan_.blocks());
  const size_t rooted = static_cast<size_t>(plan_.most_rooted()), others = static_cast<size_t>(layout_.nodes() - 1);
  const size_t slices = static_cast<size_t>(layout_.width(node)) * slots;
  Areas areas;
  size_t at = 0;
  const auto take = [&](size_t bytes) { return std::exchange(at, RoundUp(at + bytes, 64)); };
  areas.partial = take(reduces() ? slots * room * partial_size() : 0);
  areas.received = take(reduces()         ? rooted * others * room * partial_size()
                        : exchanges_all() ? blocks * room * in_size()
                                          : 0);
  areas.result = take((exchanges_all() ? blocks : std::max(spreads() ? slots : 0, rooted)) * Stride(room));
  areas.zeros = take(reduces() ? room * in_size() : 0);
  // Whole blocks that a slice lacks, and what the last elements of an array leave of their blocks.
  const size_t lacking =
      begins.empty() ? (slices - std::min(slices, blocks)) * room + blocks * std::min(room, kAlign) : slices * room;
  areas.waste = take(spreads() ? lacking * out_size() + slices * sizeof(uint64_t) : 0);
  areas.headers = take(static_cast<size_t>(layout_.nodes()) * HeaderStride());
  areas.end = at;
  return areas;
}

bool NodeOperation::Fits(size_t room) const {
  // The same answer on all nodes.
  for (int n = 0; n < layout_.nodes(); ++n) {
    if (AreasFor(room, n).end > kScratchBytes) return false;
  }
  return true;
}

size_t NodeOperation::SlicePlace(int block) const {
  const std::vector<int>& slice = plan_.slice(layout_.node_of(rank_), layout_.local_of(rank_));
  return static_cast<size_t>(std::lower_bound(slice.begin(), slice.end(), block) - slice.begin());
}

size_t NodeOperation::ResultPlace(int block) const {
  if (Is(Kind::kReduceScatter)) return 0;
  if (Is(Kind::kBroadcast) && plan_.root(block) == rank_) return static_cast<size_t>(block);
  return SlicePlace(block);
}

}  // namespace ddp
