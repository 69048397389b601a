// SPDX-License-Identifier: Apache-2.0
// All ranks reach all data: each result is computed straight from everybody's input, in chunks that whichever rank has
// time claims.
#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "libddp/base/round.h"
#include "libddp/base/spin.h"
#include "libddp/comm/host/run.h"

namespace ddp {
namespace {

// Input bytes of a chunk: small enough to share out evenly, large enough that claiming costs nothing.
constexpr size_t kChunkBytes = size_t{256} << 10;
// An operation of at most so many bytes takes less time than it would take to release the engine's mutex and lock it.
constexpr size_t kBriefBytes = size_t{64} << 10;

// Slice r is the share of an all-reduce that belongs to rank r, and in other operations rank r's result. Advance may be
// called by several threads at a time.
class DirectRun final : public Run {
 public:
  DirectRun(const Operation& operation, const RunContext& host)
      : Run({.is_brief = operation.count * operation.in_size() <= kBriefBytes, .reads_peers = true}, operation, host),
        chunk_(kChunkBytes / operation.in_size()),
        parts_(static_cast<size_t>(host.size)) {
    for (int r = 0; r < host.size; ++r) {
      const size_t elements = map_.ResultElements(r);
      part(r).chunks = elements <= chunk_ ? elements > 0 : static_cast<uint32_t>(CeilDiv(elements, chunk_));
    }
  }

  // Finds the data of all ranks; returns the first rank whose memory is not known here any more, or -1.
  int Resolve() {
    const AllocationTable::Lookup memory(*host_.allocations);
    for (int r = 0; r < host_.size; ++r) {
      if (!ResolveOne(memory, r)) return r;
    }
    return -1;
  }

  // A peer in this process that has seen the group fail waits until `working` is 0 (see Engine::DetachOutputs): either
  // it sees this thread there, or this thread sees the failure.
  absl::StatusOr<bool> Advance(bool steal, int limit) override {
    if (!host_.has_threads) return RunChunks(steal, limit);
    std::atomic<uint32_t>& working = host_.control.peer(host_.rank).working;
    working.fetch_add(1);
    const bool ran = !host_.control.failure().happened() && RunChunks(steal, limit);
    working.fetch_sub(1);
    return ran;
  }
  bool Done() const override {
    for (int r = 0; r < host_.size; ++r) {
      if (!PeerDone(r)) return false;
    }
    return true;
  }
  bool PeerDone(int peer) const override {
    return slot(peer).done.load(std::memory_order_acquire) == part(peer).chunks;
  }
  int64_t EndedNs() const override {
    int64_t last = 0;
    for (int r = 0; r < host_.size; ++r) last = std::max(last, slot(r).done_ns.load(std::memory_order_relaxed));
    return last;
  }

 private:
  Slot& slot(int rank) const { return host_.control.slot(op_.sequence, rank); }

  bool ResolveOne(const AllocationTable::Lookup& memory, int rank) {
    const Announcement& a = announcement(rank);
    const auto add = [&](RangeList& list, uint64_t address, size_t bytes) {
      char* const data = memory.Resolve(rank, address, bytes);
      if (data != nullptr) list.Add(data, bytes);
      return data != nullptr;
    };
    RangeList &in = part(rank).in, &out = part(rank).out;
    if (a.placement == Placement::kSharedRange) {
      return add(in, a.in, map_.InElements(rank) * op_.in_size()) && add(out, a.out, op_.out.bytes());
    }
    const ListedRange* entry = host_.control.listed(op_.sequence, rank);
    for (uint64_t i = 0; i < a.in + a.out; ++i, ++entry) {
      if (!add(i < a.in ? in : out, entry->address, entry->bytes)) return false;
    }
    return true;
  }

  bool RunChunks(bool steal, int limit) {
    int ran = 0;
    for (int k = 0; k < (steal ? host_.size : 1); ++k) {
      const int slice = (host_.rank + k) % host_.size;
      const uint32_t here = part(slice).chunks;
      std::atomic<uint32_t>& claimed = slot(slice).claimed;
      while (ran < limit && claimed.load(std::memory_order_relaxed) < here) {
        const uint32_t c = claimed.fetch_add(1, std::memory_order_relaxed);
        if (c >= here) break;
        RunChunk(slice, c * chunk_, std::min(map_.ResultElements(slice), (c + 1) * chunk_));
        // The clock costs too much for a small operation that nobody measures.
        if (op_.bucket >= 0) slot(slice).done_ns.store(NowNs(), std::memory_order_relaxed);
        if (here == 1) {
          slot(slice).done.store(1, std::memory_order_release);
        } else {
          slot(slice).done.fetch_add(1, std::memory_order_release);
        }
        ++ran;
      }
    }
    return ran > 0;
  }

  // Elements [lo, hi) of the slice.
  void RunChunk(int slice, size_t lo, size_t hi) {
    if (op_.Reduces()) {
      const Piece piece = map_.Reduced(slice);
      const int first = op_.Scatters() ? slice : 0, outs = op_.Scatters() ? 1 : host_.size;
      if (ReduceInto(first, outs, {piece.from + lo, piece.to + lo, hi - lo})) {
        slot(slice).nonfinite.store(1, std::memory_order_relaxed);
      }
      return;
    }
    for (int r = 0; r < host_.size; ++r) {
      const Piece piece = map_.Moved(r, slice);
      const size_t begin = std::max(lo, piece.to), end = std::min(hi, piece.to + piece.elements), size = op_.in_size();
      if (begin >= end) continue;
      part(r).in.CopyTo((piece.from + begin - piece.to) * size, part(slice).out, begin * size, (end - begin) * size);
    }
  }

  // Reduces the piece of all inputs into the outputs of `outs` ranks; stretch by stretch, where ranges end at different
  // places.
  bool ReduceInto(int first, int outs, const Piece& piece) const {
    absl::InlinedVector<const void*, 16> from(parts_.size());
    absl::InlinedVector<void*, 16> to(static_cast<size_t>(outs));
    bool nonfinite = false;
    for (size_t at = 0, n = 0; at < piece.elements; at += n) {
      n = piece.elements - at;
      size_t contiguous = 0;
      for (size_t r = 0; r < from.size(); ++r) {
        from[r] = parts_[r].in.At((piece.from + at) * op_.in_size(), &contiguous);
        n = std::min(n, contiguous / op_.in_size());
      }
      for (size_t r = 0; r < to.size(); ++r) {
        to[r] = parts_[static_cast<size_t>(first) + r].out.At((piece.to + at) * op_.out_size(), &contiguous);
        n = std::min(n, contiguous / op_.out_size());
      }
      nonfinite |= op_.reduce(from.data(), host_.size, to.data(), outs, n);
    }
    return nonfinite;
  }

  struct Part {
    RangeList in, out;
    uint32_t chunks = 0;  // of the slice
  };
  Part& part(int rank) { return parts_[static_cast<size_t>(rank)]; }
  const Part& part(int rank) const { return parts_[static_cast<size_t>(rank)]; }

  const size_t chunk_;                  // elements of a chunk, but for a slice's last one
  absl::InlinedVector<Part, 4> parts_;  // by rank
};

}  // namespace

absl::StatusOr<std::unique_ptr<Run>> MakeDirectRun(const Operation& operation, const RunContext& host) {
  auto run = std::make_unique<DirectRun>(operation, host);
  const int gone = run->Resolve();
  if (gone < 0) return run;
  return absl::FailedPreconditionError(
      absl::StrCat(operation.Describe(), ": rank ", host.NameOf(gone), " uses an Allocation that rank ",
                   host.NameOf(host.rank), " has freed; all ranks must keep an Allocation while one of them uses it"));
}

}  // namespace ddp
