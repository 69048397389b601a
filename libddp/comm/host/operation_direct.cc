// Operations on memory that all ranks reach: each result is made straight from everybody's input.
#include <algorithm>
#include <cstring>

#include "libddp/base/spin.h"
#include "libddp/comm/host/operation-inl.h"
#include "libddp/comm/host/operation.h"

namespace ddp {
namespace {

// Work is claimed in chunks of about so many input bytes: small enough to share out evenly, large enough that claiming
// costs nothing.
constexpr size_t kChunkBytes = size_t{256} << 10;

}  // namespace

// All-reduce: the array is cut into one slice per rank, which is reduced over all ranks and stored at all of them. The
// others: slice r is rank r's result.
void Operation::CutSlices(int ranks) {
  const size_t n = static_cast<size_t>(ranks);
  switch (key_.kind) {
    case OperationKey::Kind::kAllReduce:
      slice_ = ShareOf(count, 0, ranks).end;
      break;
    case OperationKey::Kind::kReduceScatter:
      slice_ = count / n;
      break;
    case OperationKey::Kind::kAllGather:
      slice_ = count * n;
      break;
    case OperationKey::Kind::kAllGatherV:
    case OperationKey::Kind::kAllToAll:
    case OperationKey::Kind::kBroadcast:
      slice_ = count;
      break;
    case OperationKey::Kind::kBarrier:
      break;
  }
  chunk_ = kChunkBytes / in_size();
  for (int r = 0; r < ranks; ++r) {
    const size_t elements = SliceElements(r);
    chunks.push_back(elements <= chunk_ ? elements > 0 : static_cast<uint32_t>(CeilDiv(elements, chunk_)));
  }
}

size_t Operation::SliceBegin(int slice) const { return std::min(count, slice_ * static_cast<size_t>(slice)); }

size_t Operation::SliceElements(int slice) const {
  if (key_.kind == OperationKey::Kind::kAllReduce) return SliceBegin(slice + 1) - SliceBegin(slice);
  return IsBroadcast() && slice == key_.root ? 0 : slice_;
}

bool Operation::ChunksDone(const ControlBlock& control) const {
  for (size_t slice = 0; slice < chunks.size(); ++slice) {
    if (control.slot(sequence, static_cast<int>(slice)).done.load(std::memory_order_acquire) != chunks[slice]) {
      return false;
    }
  }
  return true;
}

int64_t Operation::ChunksEndedNs(const ControlBlock& control) const {
  int64_t last = 0;
  for (size_t slice = 0; slice < chunks.size(); ++slice) {
    last = std::max(last, control.slot(sequence, static_cast<int>(slice)).done_ns.load(std::memory_order_relaxed));
  }
  return last;
}

int Operation::RunChunks(const ControlBlock& control, int rank, int ranks, bool steal, int limit) {
  int ran = 0;
  for (int k = 0; k < (steal ? ranks : 1); ++k) {
    const int slice = rank + k < ranks ? rank + k : rank + k - ranks;
    Slot& slot = control.slot(sequence, slice);
    const uint32_t here = chunks[static_cast<size_t>(slice)];
    while (ran < limit && slot.claimed.load(std::memory_order_relaxed) < here) {
      const uint32_t c = slot.claimed.fetch_add(1, std::memory_order_relaxed);
      if (c >= here) break;
      const size_t lo = c * chunk_;
      RunChunk(control, rank, ranks, slice, lo, std::min(SliceElements(slice), lo + chunk_));
      // The clock costs too much for a small operation that nobody measures.
      if (bucket >= 0) slot.done_ns.store(NowNs(), std::memory_order_relaxed);
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
    case OperationKey::Kind::kAllGatherV:
      for (size_t at = lo; at < hi;) {
        const int source = PartOf(at);
        const size_t within = at - PartBegin(source), n = std::min(hi - at, PartCount(source) - within);
        CopyChunk(source, within, slice, at, n);
        at += n;
      }
      return;
    case OperationKey::Kind::kAllToAll:
      for (size_t at = lo, part = count / static_cast<size_t>(ranks); at < hi;) {
        const size_t source = at / part, within = at % part, n = std::min(hi - at, part - within);
        CopyChunk(static_cast<int>(source), static_cast<size_t>(slice) * part + within, slice, at, n);
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

}  // namespace ddp
