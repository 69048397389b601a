// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/host/placement.h"

#include <algorithm>

namespace ddp {
namespace {

using Kind = OperationKey::Kind;
constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;

// Inline data is copied twice but saves the ranks a second synchronisation. With a processor for each rank that pays up
// to kMaxInline. It pays longer for a reduce-scatter, whose ranks would otherwise copy what they read before they
// reduce it. Where a synchronisation costs a turn of the scheduler, it pays up to kLargeBytes: 16 KiB of a
// reduce-scatter took 7.5 us inline and 13 to 26 us otherwise.
constexpr size_t kMaxInline = 16 * kKiB, kMaxInlineReduceScatter = 32 * kKiB;
// In an all-reduce every rank reads the data of all.
constexpr int kFewRanks = 4;
constexpr size_t kMaxInlineAllReduce = kInlineBytes, kMaxInlineAllReduceOfMany = kInlineBytes / 4;

// Reading a peer's memory costs one copy instead of two, but the kernel checks every page. For an all-reduce on two
// ranks, copies through shared memory took 1.0 times as long at 1 MiB, 1.2 times at 2 MiB, 1.6 times at 4 and 16 MiB,
// and 0.8 to 0.9 times at 64 MiB, which does not fit the caches: they read the data from memory only once. An operation
// without a second step pays from kMinFetched on.
constexpr size_t kMinFetchedAllReduce = 2 * kMiB, kMaxFetchedAllReduce = 32 * kMiB, kMinFetched = 16 * kKiB;
constexpr int kMaxFetchRanks = 64;  // more would leave small chunks for each

// An eager message is copied twice, but the sender does not wait for the receiver, which costs a turn of the scheduler
// where there are more ranks than processors. The kernel reads a little private data more slowly than it is copied
// twice. With a processor for each rank, 16 KiB depend on the machine: copied twice they took 0.6 times as long on an
// AMD EPYC and 1.3 times on an Intel Xeon.
constexpr size_t kMaxEagerShared = 4 * kKiB, kMaxEagerPrivate = 8 * kKiB;
constexpr size_t kMaxEagerSharedOversubscribed = 16 * kKiB, kMaxEagerPrivateOversubscribed = 32 * kKiB;

size_t Largest(const PlacementFacts& d) { return std::max(d.in_bytes, d.out_bytes); }

bool IsSmallBroadcast(const PlacementFacts& d) { return d.kind == Kind::kBroadcast && Largest(d) <= kInlineBytes; }

// A broadcast's root decides for all ranks. In other operations all ranks come to the same result, unless one has no
// row: then they use the stages.
bool TravelsInline(const PlacementFacts& d) {
  if (IsSmallBroadcast(d)) return true;
  if (d.kind == Kind::kBroadcast ? !d.is_root || (d.shared && !d.oversubscribed) : d.shared) return false;
  if (d.kind == Kind::kAllReduce) {
    return d.in_bytes <= (d.ranks > kFewRanks ? kMaxInlineAllReduceOfMany : kMaxInlineAllReduce);
  }
  const size_t most = d.kind == Kind::kReduceScatter ? kMaxInlineReduceScatter : kMaxInline;
  return Largest(d) <= (d.oversubscribed ? kLargeBytes : most) && (d.in_bytes <= kInlineBytes || d.has_large_row);
}

bool ReadingPays(const PlacementFacts& d) {
  if (d.in_ranges != 1 || d.out_ranges != 1 || d.ranks == 1 || d.ranks > kMaxFetchRanks || d.in_place) return false;
  if (d.kind != Kind::kAllReduce) return Largest(d) >= kMinFetched;
  return Largest(d) >= kMinFetchedAllReduce && Largest(d) <= kMaxFetchedAllReduce;
}

}  // namespace

bool CanBeShared(const PlacementFacts& facts) {
  if (IsSmallBroadcast(facts)) return false;  // travels inline from any memory
  if (facts.in_place) return false;           // a peer would overwrite what others have still to read
  return facts.in_ranges + facts.out_ranges <= kMaxListedRanges;
}

Placement ChoosePlacement(const PlacementFacts& facts) {
  if (TravelsInline(facts)) return Placement::kInline;
  if (facts.shared) {
    return facts.in_ranges == 1 && facts.out_ranges == 1 ? Placement::kSharedRange : Placement::kSharedList;
  }
  return facts.readable && ReadingPays(facts) ? Placement::kReadable : Placement::kPrivate;
}

Route ChooseRoute(absl::Span<const Placement> placements, int root) {
  const auto all = [&](auto is) { return std::all_of(placements.begin(), placements.end(), is); };
  if (root >= 0 ? placements[static_cast<size_t>(root)] == Placement::kInline
                : all([](Placement p) { return p == Placement::kInline; })) {
    return Route::kInline;
  }
  if (all([](Placement p) { return p == Placement::kSharedRange || p == Placement::kSharedList; })) {
    return Route::kDirect;
  }
  return all([](Placement p) { return p == Placement::kReadable; }) ? Route::kFetched : Route::kStaged;
}

size_t MaxEagerBytes(bool shared, bool oversubscribed) {
  if (oversubscribed) return shared ? kMaxEagerSharedOversubscribed : kMaxEagerPrivateOversubscribed;
  return shared ? kMaxEagerShared : kMaxEagerPrivate;
}

}  // namespace ddp
