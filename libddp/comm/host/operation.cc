#include "libddp/comm/host/operation.h"

#include <algorithm>

#include "libddp/comm/host/engine.h"
#include "libddp/comm/host/operation-inl.h"

namespace ddp {

size_t Operation::in_bytes(int rank) const {
  return key_.kind == OperationKey::Kind::kAllGatherV ? PartCount(rank) * in_size() : in_bytes();
}

int Operation::PartOf(size_t element) const {
  if (begins.empty()) return static_cast<int>(element / count);
  return static_cast<int>(std::upper_bound(begins.begin(), begins.end(), element) - begins.begin()) - 1;
}

absl::Status Operation::Wait(absl::Time deadline) {
  if (Done()) return status();
  return engine_->Wait(
      *this, [this] { return called().Describe(called_count()); }, deadline);
}

// --- inline ---------------------------------------------------------------------------------------------------------

void Operation::PutInline(const ControlBlock& control, SharedWriter* writer, int rank, int ranks) const {
  const size_t bytes = InlineBytes(rank);
  if (bytes == 0) return;
  char* const to = control.inlined(sequence, rank, bytes);
  if (!Scatters()) return writer->Copy(in, 0, to, bytes);
  const size_t part = bytes / static_cast<size_t>(ranks), own = part * static_cast<size_t>(rank);  // not the peers'
  writer->Copy(in, 0, to, own);
  writer->Copy(in, own + part, to + own + part, bytes - own - part);
}

void Operation::TakeInline(const ControlBlock& control, int rank, int ranks) {
  if (count == 0) return;
  const size_t in_size = SizeOf(key_.in), out_size = SizeOf(key_.out);
  const auto inlined = [&](int r) { return control.inlined(sequence, r, in_bytes(r)); };
  switch (key_.kind) {
    case OperationKey::Kind::kBarrier:
      return;
    case OperationKey::Kind::kBroadcast:
      if (rank != key_.root) out.CopyIn(0, inlined(key_.root), in_bytes());
      return;
    case OperationKey::Kind::kAllGather:
    case OperationKey::Kind::kAllGatherV:
      for (int r = 0; r < ranks; ++r) {
        if (r != rank) out.CopyIn(PartBegin(r) * in_size, inlined(r), in_bytes(r));
      }
      in.CopyTo(0, out, PartBegin(rank) * in_size, in_bytes(rank));
      return;
    case OperationKey::Kind::kAllToAll: {
      const size_t part = in_bytes() / static_cast<size_t>(ranks), own = static_cast<size_t>(rank) * part;
      for (int r = 0; r < ranks; ++r) {
        if (r != rank) out.CopyIn(static_cast<size_t>(r) * part, inlined(r) + own, part);
      }
      in.CopyTo(own, out, own, part);
      return;
    }
    case OperationKey::Kind::kAllReduce:
    case OperationKey::Kind::kReduceScatter: {
      const bool scatter = key_.kind == OperationKey::Kind::kReduceScatter;
      const size_t n = scatter ? count / static_cast<size_t>(ranks) : count;
      const size_t begin = scatter ? n * static_cast<size_t>(rank) : 0;
      const bool bad = ReduceLists(
          reduce, ranks,
          [&](int r, size_t at, size_t* contiguous) -> const void* {
            if (r == rank) return in.At((begin + at) * in_size, contiguous);
            *contiguous = (n - at) * in_size;
            return inlined(r) + (begin + at) * in_size;
          },
          in_size, 1, [&](int, size_t at, size_t* contiguous) { return out.At(at * out_size, contiguous); }, out_size,
          n);
      if (bad) control.slot(sequence, rank).nonfinite.store(1, std::memory_order_relaxed);
      return;
    }
  }
}

}  // namespace ddp
