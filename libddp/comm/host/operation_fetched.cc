// Private data of processes that can read each other's memory (process_vm_readv). Each rank (1) fetches its share of
// everybody's data, a chunk at a time, and reduces it in rank order into its own output, and (2), once all have,
// fetches the others' results. It writes to nobody's memory, and leaves when all have read what they need of its own.
// One copy where stages take two, and never of what another core has just written: that is faster where data is larger
// than the caches next to a core. The kernel checks each page of a copy, which is what makes it slower below.
#include <algorithm>

#include "libddp/comm/host/operation-inl.h"
#include "libddp/comm/host/operation.h"
#include "libddp/comm/memory/read_process.h"

namespace ddp {
namespace {

// Fetched to be reduced: stays in the cache between the two.
constexpr size_t kFetchedChunkBytes = size_t{256} << 10;
// Fetched in one turn, so that a failure is noticed in between.
constexpr size_t kFetchedPieceBytes = size_t{4} << 20;

absl::Status FetchFrom(const PeerWatch& peers, int peer, const char* from, const RangeList& to) {
  RangeList source;
  source.Add(const_cast<char*>(from), to.bytes());  // NOLINT: it is only read
  return ReadProcess(peer, peers.pid(peer), source, to);
}

}  // namespace

absl::StatusOr<bool> Operation::RunFetches(const ControlBlock& control, const PeerWatch& peers, int rank, int ranks) {
  const uint64_t reached = first_round + 1;
  absl::Status status;
  if (phase == Phase::kReduce && Reduces()) {
    status = FetchAndReduce(control, peers, rank, ranks);
  } else if (phase != Phase::kLeave) {
    if (HasTwoSteps() && !control.AllReached(&PeerLine::reduced, reached)) return false;
    status = FetchResults(control, peers, rank, ranks);
  } else if (control.AllReached(&PeerLine::copied, reached)) {
    ++round;
  } else {
    return false;
  }
  if (!status.ok()) return status;
  return true;
}

// Reduces the next piece of this rank's share.
absl::Status Operation::FetchAndReduce(const ControlBlock& control, const PeerWatch& peers, int rank, int ranks) {
  const bool scatter = key_.kind == OperationKey::Kind::kReduceScatter;
  // Nobody reads this rank's stage of this round.
  char* const scratch = control.stage(rank, first_round);
  const size_t slot = std::min(kFetchedChunkBytes, kStageBytes / static_cast<size_t>(ranks - 1)) / in_size() /
                      kSliceAlign * kSliceAlign * in_size();
  const size_t part = count / static_cast<size_t>(ranks);
  const Share mine = scatter ? Share{0, part} : ShareOf(count, rank, ranks);
  const size_t share = mine.end - mine.begin, out_begin = scatter ? 0 : mine.begin;
  const size_t in_begin = scatter ? part * static_cast<size_t>(rank) : out_begin;
  const auto slot_of = [&](int r) { return scratch + static_cast<size_t>(r < rank ? r : r - 1) * slot; };
  for (const size_t end = std::min(share, fetched_ + kFetchedPieceBytes / in_size()); fetched_ < end;) {
    const size_t n = std::min(slot / in_size(), end - fetched_), begin = in_begin + fetched_;
    for (int k = 1; k < ranks; ++k) {
      const int r = (rank + k) % ranks;
      RangeList to;
      to.Add(slot_of(r), n * in_size());
      const absl::Status status = FetchFrom(peers, r, in_bases[static_cast<size_t>(r)] + begin * in_size(), to);
      if (!status.ok()) return status;
    }
    const bool bad = ReduceLists(
        reduce, ranks,
        [&](int r, size_t at, size_t* contiguous) -> const void* {
          if (r == rank) return in.At((begin + at) * in_size(), contiguous);
          *contiguous = (n - at) * in_size();
          return slot_of(r) + at * in_size();
        },
        in_size(), 1,
        [&](int, size_t at, size_t* contiguous) {
          return out.At((out_begin + fetched_ + at) * out_size(), contiguous);
        },
        out_size(), n);
    if (bad) control.slot(sequence, rank).nonfinite.store(1, std::memory_order_relaxed);
    fetched_ += n;
  }
  if (fetched_ < share) return absl::OkStatus();
  control.peer(rank).reduced.store(first_round + 1, std::memory_order_release);
  phase = Phase::kCopyOut;
  fetched_ = 0;
  return absl::OkStatus();
}

// What of a peer's data belongs in this rank's output, in the second step.
Operation::Fetch Operation::ResultOf(int peer, int rank, int ranks) const {
  const size_t p = static_cast<size_t>(peer), size = in_size();
  const auto in_at = [&](size_t element) { return reinterpret_cast<uintptr_t>(in_bases[p] + element * size); };
  switch (key_.kind) {
    case OperationKey::Kind::kAllReduce: {
      const Share share = ShareOf(count, peer, ranks);
      const size_t begin = share.begin * out_size();
      return {reinterpret_cast<uintptr_t>(out_bases[p] + begin), begin, (share.end - share.begin) * out_size()};
    }
    case OperationKey::Kind::kAllGather:
    case OperationKey::Kind::kAllGatherV:
      return {in_at(0), PartBegin(peer) * size, PartCount(peer) * size};
    case OperationKey::Kind::kAllToAll: {
      const size_t part = count / static_cast<size_t>(ranks);
      return {in_at(static_cast<size_t>(rank) * part), p * part * size, part * size};
    }
    case OperationKey::Kind::kBroadcast:
      return {in_at(0), 0, peer == key_.root ? in_bytes() : 0};
    case OperationKey::Kind::kReduceScatter:
    case OperationKey::Kind::kBarrier:
      break;
  }
  return {0, 0, 0};
}

// Fetches the next piece of the peers' results.
absl::Status Operation::FetchResults(const ControlBlock& control, const PeerWatch& peers, int rank, int ranks) {
  const bool copies_own = key_.kind == OperationKey::Kind::kAllGather || key_.kind == OperationKey::Kind::kAllGatherV ||
                          key_.kind == OperationKey::Kind::kAllToAll;
  if (copies_own && peers_fetched_ == 0 && fetched_ == 0) {
    const Fetch own = ResultOf(rank, rank, ranks);
    in.CopyTo(own.from - reinterpret_cast<uintptr_t>(in_bases[static_cast<size_t>(rank)]), out, own.to, own.bytes);
  }
  for (size_t left = kFetchedPieceBytes; peers_fetched_ < ranks - 1;) {
    if (left == 0) return absl::OkStatus();
    const int peer = (rank + 1 + peers_fetched_) % ranks;  // not all from the same one at once
    const Fetch result = ResultOf(peer, rank, ranks);
    const size_t n = std::min(left, result.bytes - fetched_);
    RangeList to;
    to.AddFrom(out, result.to + fetched_, n);
    const absl::Status status = FetchFrom(peers, peer, reinterpret_cast<const char*>(result.from + fetched_), to);
    if (!status.ok()) return status;
    fetched_ += n;
    left -= n;
    if (fetched_ < result.bytes) continue;
    ++peers_fetched_;
    fetched_ = 0;
  }
  control.peer(rank).copied.store(first_round + 1, std::memory_order_release);
  phase = Phase::kLeave;
  return absl::OkStatus();
}

}  // namespace ddp
