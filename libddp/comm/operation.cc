#include "libddp/comm/operation.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "libddp/comm/engine.h"

namespace ddp {
namespace {

// Slices begin at multiples of so many elements: whole cache lines for every type.
constexpr size_t kSliceAlign = 64;
// Work is claimed in chunks of about so many input bytes: small enough to share out evenly, large enough that claiming
// costs nothing.
constexpr size_t kChunkBytes = size_t{256} << 10;

size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }
size_t CeilDiv(size_t n, size_t by) { return (n + by - 1) / by; }

// Reduces `count` elements from every `ins` list to every `outs` list, stretch by stretch where ranges end at different
// places.
template <typename InAt, typename OutAt>
bool ReduceLists(const CpuReduce& reduce, int ins, InAt in_at, size_t in_size, int outs, OutAt out_at, size_t out_size,
                 size_t count) {
  absl::InlinedVector<const void*, 16> from(static_cast<size_t>(ins));
  absl::InlinedVector<void*, 16> to(static_cast<size_t>(outs));
  bool nonfinite = false;
  for (size_t at = 0; at < count;) {
    size_t n = count - at;
    for (int r = 0; r < ins; ++r) {
      size_t contiguous = 0;
      from[static_cast<size_t>(r)] = in_at(r, at, &contiguous);
      n = std::min(n, contiguous / in_size);
    }
    for (int r = 0; r < outs; ++r) {
      size_t contiguous = 0;
      to[static_cast<size_t>(r)] = out_at(r, at, &contiguous);
      n = std::min(n, contiguous / out_size);
    }
    nonfinite |= reduce(from.data(), ins, to.data(), outs, n);
    at += n;
  }
  return nonfinite;
}

}  // namespace

uint64_t OperationKey::Pack() const {
  return uint64_t{static_cast<uint8_t>(kind)} | uint64_t{static_cast<uint8_t>(in)} << 8 |
         uint64_t{static_cast<uint8_t>(out)} << 16 | uint64_t{static_cast<uint8_t>(op)} << 24 |
         uint64_t{check_nonfinite} << 32 | uint64_t{root} << 40;
}

OperationKey OperationKey::Unpack(uint64_t packed) {
  OperationKey key;
  key.kind = static_cast<Kind>(packed & 0xff);
  key.in = static_cast<DType>(packed >> 8 & 0xff);
  key.out = static_cast<DType>(packed >> 16 & 0xff);
  key.op = static_cast<ReduceOp>(packed >> 24 & 0xff);
  key.check_nonfinite = (packed >> 32 & 0xff) != 0;
  key.root = static_cast<uint16_t>(packed >> 40 & 0xffff);
  return key;
}

std::string OperationKey::Describe(uint64_t count) const {
  const std::string types =
      in == out ? std::string(Name(in)) : absl::StrCat(std::string(Name(in)), " to ", std::string(Name(out)));
  switch (kind) {
    case Kind::kAllReduce:
      return absl::StrCat("all_reduce(", Name(op), ", ", types, ", ", count, " elements",
                          check_nonfinite ? ", non-finite check)" : ")");
    case Kind::kReduceScatter:
      return absl::StrCat("reduce_scatter(", Name(op), ", ", types, ", ", count, " elements",
                          check_nonfinite ? ", non-finite check)" : ")");
    case Kind::kAllGather:
      return absl::StrCat("all_gather(", types, ", ", count, " elements)");
    case Kind::kBroadcast:
      return absl::StrCat("broadcast(from rank ", root, ", ", types, ", ", count, " elements)");
    case Kind::kBarrier:
      return "barrier()";
  }
  return "an unknown operation";
}

absl::Status Operation::Wait(absl::Time deadline) { return Done() ? status_ : engine_->Wait(this, deadline); }

// --- inline ---------------------------------------------------------------------------------------------------------

void Operation::PutInline(const ControlBlock& control, int rank) const {
  if (count == 0 || key_.kind == OperationKey::Kind::kBarrier) return;
  if (key_.kind == OperationKey::Kind::kBroadcast && rank != key_.root) return;
  in.CopyOut(0, control.inlined(sequence, rank), in_bytes());
}

void Operation::TakeInline(const ControlBlock& control, int rank, int ranks) {
  if (count == 0) return;
  const size_t in_size = SizeOf(key_.in), out_size = SizeOf(key_.out);
  switch (key_.kind) {
    case OperationKey::Kind::kBarrier:
      return;
    case OperationKey::Kind::kBroadcast:
      if (rank != key_.root) out.CopyIn(0, control.inlined(sequence, key_.root), in_bytes());
      return;
    case OperationKey::Kind::kAllGather:
      for (int r = 0; r < ranks; ++r) {
        out.CopyIn(static_cast<size_t>(r) * in_bytes(), control.inlined(sequence, r), in_bytes());
      }
      return;
    case OperationKey::Kind::kAllReduce:
    case OperationKey::Kind::kReduceScatter: {
      const bool scatter = key_.kind == OperationKey::Kind::kReduceScatter;
      const size_t n = scatter ? count / static_cast<size_t>(ranks) : count;
      const size_t begin = scatter ? n * static_cast<size_t>(rank) : 0;
      const bool bad = ReduceLists(
          reduce, ranks,
          [&](int r, size_t at, size_t* contiguous) {
            *contiguous = (n - at) * in_size;
            return control.inlined(sequence, r) + (begin + at) * in_size;
          },
          in_size, 1, [&](int, size_t at, size_t* contiguous) { return out.At(at * out_size, contiguous); }, out_size,
          n);
      if (bad) control.slot(sequence, rank).nonfinite.store(1, std::memory_order_relaxed);
      return;
    }
  }
}

// --- direct ---------------------------------------------------------------------------------------------------------

// All-reduce: the array is cut into one slice per rank, which is reduced over all ranks and stored at all of them. The
// others: slice r is rank r's result.
void Operation::CutSlices(int ranks) {
  const size_t n = static_cast<size_t>(ranks);
  switch (key_.kind) {
    case OperationKey::Kind::kAllReduce:
      slice_ = RoundUp(CeilDiv(count, n), kSliceAlign);
      break;
    case OperationKey::Kind::kReduceScatter:
      slice_ = count / n;
      break;
    case OperationKey::Kind::kAllGather:
      slice_ = count * n;
      break;
    case OperationKey::Kind::kBroadcast:
      slice_ = count;
      break;
    case OperationKey::Kind::kBarrier:
      break;
  }
  const size_t chunk = ChunkElements();
  for (int r = 0; r < ranks; ++r) {
    const size_t elements = SliceElements(r);
    chunks.push_back(elements <= chunk ? elements > 0 : static_cast<uint32_t>(CeilDiv(elements, chunk)));
  }
}

size_t Operation::ChunkElements() const { return kChunkBytes / in_size(); }

size_t Operation::SliceBegin(int slice) const { return std::min(count, slice_ * static_cast<size_t>(slice)); }

size_t Operation::SliceElements(int slice) const {
  if (key_.kind == OperationKey::Kind::kAllReduce) return SliceBegin(slice + 1) - SliceBegin(slice);
  return key_.kind == OperationKey::Kind::kBroadcast && slice == key_.root ? 0 : slice_;
}

bool Operation::ChunksDone(const ControlBlock& control) const {
  for (size_t slice = 0; slice < chunks.size(); ++slice) {
    if (control.slot(sequence, static_cast<int>(slice)).done.load(std::memory_order_acquire) != chunks[slice]) {
      return false;
    }
  }
  return true;
}

int Operation::RunChunks(const ControlBlock& control, int rank, int ranks, bool steal, int limit) {
  const size_t chunk = ChunkElements();
  int ran = 0;
  for (int k = 0; k < (steal ? ranks : 1); ++k) {
    const int slice = rank + k < ranks ? rank + k : rank + k - ranks;
    Slot& slot = control.slot(sequence, slice);
    const uint32_t here = chunks[static_cast<size_t>(slice)];
    while (ran < limit && slot.claimed.load(std::memory_order_relaxed) < here) {
      const uint32_t c = slot.claimed.fetch_add(1, std::memory_order_relaxed);
      if (c >= here) break;
      const size_t lo = c * chunk;
      RunChunk(control, rank, ranks, slice, lo, std::min(SliceElements(slice), lo + chunk));
      if (here == 1) {
        slot.done.store(1, std::memory_order_release);
      } else {
        slot.done.fetch_add(1, std::memory_order_release);
      }
      ++ran;
    }
  }
  return ran;
}

void Operation::RunChunk(const ControlBlock& control, int rank, int ranks, int slice, size_t lo, size_t hi) {
  switch (key_.kind) {
    case OperationKey::Kind::kBarrier:
      return;
    case OperationKey::Kind::kBroadcast:
      return CopyChunk(key_.root, lo, slice, lo, hi - lo);
    case OperationKey::Kind::kAllGather:
      for (size_t at = lo; at < hi;) {
        const size_t source = at / count, within = at % count;
        const size_t n = std::min(hi - at, count - within);
        CopyChunk(static_cast<int>(source), within, slice, at, n);
        at += n;
      }
      return;
    case OperationKey::Kind::kAllReduce: {
      const size_t begin = SliceBegin(slice) + lo;
      if (ReduceChunk(ranks, begin, 0, ranks, begin, hi - lo)) {
        control.slot(sequence, rank).nonfinite.store(1, std::memory_order_relaxed);
      }
      return;
    }
    case OperationKey::Kind::kReduceScatter:
      if (ReduceChunk(ranks, static_cast<size_t>(slice) * slice_ + lo, slice, 1, lo, hi - lo)) {
        control.slot(sequence, slice).nonfinite.store(1, std::memory_order_relaxed);
      }
      return;
  }
}

// `n` elements from in_begin on, over all ranks, to the outputs of `outs_count` ranks.
bool Operation::ReduceChunk(int ranks, size_t in_begin, int first_out, int outs_count, size_t out_begin,
                            size_t n) const {
  const size_t first = static_cast<size_t>(first_out);
  if (!in_bases.empty()) {
    absl::InlinedVector<const void*, 16> from(in_bases.begin(), in_bases.end());
    absl::InlinedVector<void*, 16> to(out_bases.begin() + first_out, out_bases.begin() + first_out + outs_count);
    for (const void*& p : from) p = static_cast<const char*>(p) + in_begin * in_size();
    for (void*& p : to) p = static_cast<char*>(p) + out_begin * out_size();
    return reduce(from.data(), ranks, to.data(), outs_count, n);
  }
  return ReduceLists(
      reduce, ranks,
      [&](int r, size_t at, size_t* contiguous) {
        return ins[static_cast<size_t>(r)].At((in_begin + at) * in_size(), contiguous);
      },
      in_size(), outs_count,
      [&](int r, size_t at, size_t* contiguous) {
        return outs[first + static_cast<size_t>(r)].At((out_begin + at) * out_size(), contiguous);
      },
      out_size(), n);
}

void Operation::CopyChunk(int source, size_t from, int target, size_t to, size_t elements) const {
  const size_t s = static_cast<size_t>(source), t = static_cast<size_t>(target), size = in_size();
  if (in_bases.empty()) return ins[s].CopyTo(from * size, outs[t], to * size, elements * size);
  char* const here = in_bases[s] + from * size;
  char* const there = out_bases[t] + to * size;
  if (here != there) std::memcpy(there, here, elements * size);
}

// --- staged ---------------------------------------------------------------------------------------------------------
//
// Private data passes through the stages in rounds. In a round each rank (1) copies into its stage what others need of
// its data, (2) once all have, reduces its own share from its private data and the others' stages, keeping one copy and
// leaving one in its own stage where nobody's input lies, and (3) once all have, copies the others' results out. Stages
// alternate between two halves: a rank that lays out round g + 2 has seen everybody finish (2) of round g + 1, and so
// (3) of round g. A round fits the cache: that, not the number of steps, decides the speed.

size_t Operation::StagedElements(int ranks) const {
  return key_.kind == OperationKey::Kind::kReduceScatter ? count / static_cast<size_t>(ranks) : count;
}

// Elements that one round moves (reduce-scatter: of each rank's part).
size_t Operation::RoundElements(int ranks) const {
  const size_t fit = kStageBytes / std::max(SizeOf(key_.in), SizeOf(key_.out));
  const size_t share = fit / static_cast<size_t>(ranks) / kSliceAlign * kSliceAlign;
  return key_.kind == OperationKey::Kind::kReduceScatter ? share : share * static_cast<size_t>(ranks);
}

uint64_t Operation::Rounds(int ranks) const { return CeilDiv(StagedElements(ranks), RoundElements(ranks)); }

bool Operation::RunRounds(const ControlBlock& control, int rank, int ranks) {
  const uint64_t rounds = Rounds(ranks);
  bool progressed = false;
  const auto all_reached = [&](std::atomic<uint64_t> PeerLine::*counter, uint64_t value) {
    for (int r = 0; r < ranks; ++r) {
      if ((control.peer(r).*counter).load(std::memory_order_acquire) < value) return false;
    }
    return true;
  };
  while (round < rounds) {
    const uint64_t global = first_round + round;
    switch (phase) {
      case Phase::kCopyIn:
        StageIn(control, rank, ranks);
        control.peer(rank).copied.store(global + 1, std::memory_order_release);
        phase = Phase::kReduce;
        break;
      case Phase::kReduce:
        if (!all_reached(&PeerLine::copied, global + 1)) return progressed;
        StageReduce(control, rank, ranks);
        control.peer(rank).reduced.store(global + 1, std::memory_order_release);
        phase = Phase::kCopyOut;
        break;
      case Phase::kCopyOut:
        if (!all_reached(&PeerLine::reduced, global + 1)) return progressed;
        StageOut(control, rank, ranks);
        phase = Phase::kCopyIn;
        ++round;
        break;
    }
    progressed = true;
  }
  return progressed;
}

namespace {

// The share of rank r in a round of `n` elements.
struct Share {
  size_t begin, end;
};
Share ShareOf(size_t n, int r, int ranks) {
  const size_t per_rank = RoundUp(CeilDiv(n, static_cast<size_t>(ranks)), kSliceAlign);
  const size_t begin = std::min(n, per_rank * static_cast<size_t>(r));
  return {begin, std::min(n, begin + per_rank)};
}

}  // namespace

void Operation::StageIn(const ControlBlock& control, int rank, int ranks) const {
  const size_t size = SizeOf(key_.in), slot_size = std::max(size, SizeOf(key_.out));
  const size_t base = round * RoundElements(ranks), n = std::min(RoundElements(ranks), StagedElements(ranks) - base);
  char* const stage = control.stage(rank, first_round + round);
  switch (key_.kind) {
    case OperationKey::Kind::kAllReduce:
      for (int r = 0; r < ranks; ++r) {
        const Share share = ShareOf(n, r, ranks);
        if (r == rank || share.begin == share.end) continue;
        in.CopyOut((base + share.begin) * size, stage + share.begin * slot_size, (share.end - share.begin) * size);
      }
      return;
    case OperationKey::Kind::kReduceScatter:
      for (int r = 0; r < ranks; ++r) {
        if (r == rank) continue;
        const size_t from = static_cast<size_t>(r) * StagedElements(ranks) + base;
        in.CopyOut(from * size, stage + static_cast<size_t>(r) * RoundElements(ranks) * slot_size, n * size);
      }
      return;
    case OperationKey::Kind::kAllGather:
      in.CopyOut(base * size, stage, n * size);
      return;
    case OperationKey::Kind::kBroadcast:
      if (rank == key_.root) in.CopyOut(base * size, stage, n * size);
      return;
    case OperationKey::Kind::kBarrier:
      return;
  }
}

void Operation::StageReduce(const ControlBlock& control, int rank, int ranks) const {
  const bool scatter = key_.kind == OperationKey::Kind::kReduceScatter;
  if (!scatter && key_.kind != OperationKey::Kind::kAllReduce) return;
  const size_t in_size = SizeOf(key_.in), out_size = SizeOf(key_.out), slot_size = std::max(in_size, out_size);
  const size_t base = round * RoundElements(ranks), n = std::min(RoundElements(ranks), StagedElements(ranks) - base);
  const uint64_t global = first_round + round;
  const Share share = scatter ? Share{0, n} : ShareOf(n, rank, ranks);
  if (share.begin == share.end) return;
  const size_t count_here = share.end - share.begin;
  // Where this rank's share lies: in every stage, in its own input, in its own output.
  const size_t in_stage = (scatter ? static_cast<size_t>(rank) * RoundElements(ranks) : share.begin) * slot_size;
  const size_t in_begin = (scatter ? static_cast<size_t>(rank) * StagedElements(ranks) : share.begin) + base;
  const size_t out_begin = base + share.begin;
  const bool bad = ReduceLists(
      reduce, ranks,
      [&](int r, size_t at, size_t* contiguous) -> const void* {
        if (r == rank) return in.At((in_begin + at) * in_size, contiguous);
        *contiguous = (count_here - at) * in_size;
        return control.stage(r, global) + in_stage + at * in_size;
      },
      in_size, scatter ? 1 : 2,
      [&](int which, size_t at, size_t* contiguous) -> void* {
        if (which == 0) return out.At((out_begin + at) * out_size, contiguous);
        *contiguous = (count_here - at) * out_size;
        return control.stage(rank, global) + in_stage + at * out_size;
      },
      out_size, count_here);
  if (bad) control.slot(sequence, rank).nonfinite.store(1, std::memory_order_relaxed);
}

void Operation::StageOut(const ControlBlock& control, int rank, int ranks) const {
  const size_t size = SizeOf(key_.out), slot_size = std::max(SizeOf(key_.in), size);
  const size_t base = round * RoundElements(ranks), n = std::min(RoundElements(ranks), StagedElements(ranks) - base);
  const uint64_t global = first_round + round;
  switch (key_.kind) {
    case OperationKey::Kind::kAllReduce:
      for (int r = 0; r < ranks; ++r) {
        const Share share = ShareOf(n, r, ranks);
        if (r == rank || share.begin == share.end) continue;
        out.CopyIn((base + share.begin) * size, control.stage(r, global) + share.begin * slot_size,
                   (share.end - share.begin) * size);
      }
      return;
    case OperationKey::Kind::kAllGather:
      for (int r = 0; r < ranks; ++r) {
        const size_t to = (static_cast<size_t>(r) * count + base) * size;
        if (r == rank) {
          in.CopyTo(base * size, out, to, n * size);
        } else {
          out.CopyIn(to, control.stage(r, global), n * size);
        }
      }
      return;
    case OperationKey::Kind::kBroadcast:
      if (rank != key_.root) out.CopyIn(base * size, control.stage(key_.root, global), n * size);
      return;
    case OperationKey::Kind::kReduceScatter:
    case OperationKey::Kind::kBarrier:
      return;
  }
}

}  // namespace ddp
