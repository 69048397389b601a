// SPDX-License-Identifier: Apache-2.0
// Private data of processes that can read each other's memory (process_vm_readv). Each rank (1) fetches its share of
// everybody's data, a chunk at a time, and reduces it in rank order into its own output, and (2), once all have,
// fetches the others' results. It writes to nobody's memory, and leaves when all have read what they need of its own.
#include <algorithm>
#include <vector>

#include "libddp/comm/host/run.h"
#include "libddp/comm/memory/read_process.h"

namespace ddp {
namespace {

// What is fetched to be reduced stays in the cache until it is.
constexpr size_t kFetchBytes = size_t{256} << 10;
// Fetched in one turn, so that a failure is noticed in between.
constexpr size_t kTurnBytes = size_t{4} << 20;

class FetchedRun final : public Run {
 public:
  FetchedRun(const Operation& operation, const RunContext& host, uint64_t round)
      : Run({.takes_turns = true, .reads_peers = true}, operation, host),
        round_(round),
        phase_(operation.Reduces() ? Phase::kReduce : Phase::kFetch) {}

  absl::StatusOr<bool> Advance(bool, int) override {
    absl::Status status;
    if (phase_ == Phase::kReduce) {
      status = ReduceNext();
    } else if (phase_ == Phase::kFetch) {
      if (op_.IsAllReduce() && !host_.control.AllReached(&PeerLine::reduced, round_ + 1)) return false;
      status = FetchNext();
    } else if (phase_ == Phase::kLeave) {
      if (!host_.control.AllReached(&PeerLine::copied, round_ + 1)) return false;
      phase_ = Phase::kDone;
    }
    if (!status.ok()) return status;
    return true;
  }
  bool Done() const override { return phase_ == Phase::kDone; }
  bool PeerDone(int peer) const override {
    return host_.control.peer(peer).copied.load(std::memory_order_acquire) > round_;
  }
  uint64_t Rounds() const override { return 1; }

 private:
  enum class Phase { kReduce, kFetch, kLeave, kDone };

  absl::Status FetchFrom(int peer, uint64_t address, const RangeList& to) const {
    RangeList from;
    from.Add(reinterpret_cast<char*>(static_cast<uintptr_t>(address)), to.bytes());
    return ReadProcess(host_.NameOf(peer), host_.peers->pid(peer), from, to);
  }

  // Reduces the next part of this rank's share.
  absl::Status ReduceNext() {
    const size_t size = op_.in_size(), others = static_cast<size_t>(host_.size - 1);
    const size_t chunk = std::min(kFetchBytes, kStageBytes / others) / size / kShareAlign * kShareAlign;
    char* const scratch = host_.control.stage(host_.rank, round_);  // which nobody reads in this round
    const auto chunk_of = [&](int r) {
      return scratch + static_cast<size_t>(r < host_.rank ? r : r - 1) * chunk * size;
    };
    const Piece share = map_.Reduced(host_.rank);
    for (const size_t end = std::min(share.elements, done_ + kTurnBytes / size); done_ < end;) {
      const Piece piece{share.from + done_, share.to + done_, std::min(chunk, end - done_)};
      for (int k = 1; k < host_.size; ++k) {
        const int r = (host_.rank + k) % host_.size;
        RangeList to;
        to.Add(chunk_of(r), piece.elements * size);
        if (absl::Status s = FetchFrom(r, announcement(r).in + piece.from * size, to); !s.ok()) return s;
      }
      Reduce(piece, chunk_of);
      done_ += piece.elements;
    }
    if (done_ < share.elements) return absl::OkStatus();
    host_.control.peer(host_.rank).reduced.store(round_ + 1, std::memory_order_release);
    phase_ = Phase::kFetch;
    done_ = 0;
    return absl::OkStatus();
  }

  // Fetches the next part of the peers' results, or of their data.
  absl::Status FetchNext() {
    const size_t size = op_.out_size();
    if (peers_fetched_ == 0 && done_ == 0) MoveOwn(map_.Moved(host_.rank, host_.rank));
    for (size_t left = kTurnBytes; peers_fetched_ < host_.size - 1;) {
      if (left == 0) return absl::OkStatus();
      const int peer = (host_.rank + 1 + peers_fetched_) % host_.size;  // not all from the same one at once
      const Piece piece = map_.Moved(peer, host_.rank);
      const uint64_t base = op_.IsAllReduce() ? announcement(peer).out : announcement(peer).in;
      const size_t bytes = piece.elements * size, n = std::min(left, bytes - done_);
      RangeList to;
      to.AddFrom(op_.out, piece.to * size + done_, n);
      if (absl::Status s = FetchFrom(peer, base + piece.from * size + done_, to); !s.ok()) return s;
      done_ += n;
      left -= n;
      if (done_ < bytes) continue;
      ++peers_fetched_;
      done_ = 0;
    }
    host_.control.peer(host_.rank).copied.store(round_ + 1, std::memory_order_release);
    phase_ = Phase::kLeave;
    return absl::OkStatus();
  }

  const uint64_t round_;
  Phase phase_;
  int peers_fetched_ = 0;
  size_t done_ = 0;  // kReduce: elements of this rank's share. kFetch: bytes of the next peer's
};

}  // namespace

std::unique_ptr<Run> MakeFetchedRun(const Operation& operation, const RunContext& host, uint64_t first_round) {
  return std::make_unique<FetchedRun>(operation, host, first_round);
}

}  // namespace ddp
