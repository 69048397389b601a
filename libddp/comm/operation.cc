#include "libddp/comm/operation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "libddp/comm/engine.h"
#include "libddp/comm/operation-inl.h"

namespace ddp {

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
    case Kind::kAllGatherV:
      return absl::StrCat("all_gather_v(", types, ", ", count, " elements in all)");
    case Kind::kAllToAll:
      return absl::StrCat("all_to_all(", types, ", ", count, " elements)");
    case Kind::kBroadcast:
      return absl::StrCat("broadcast(from rank ", root, ", ", types, ", ", count, " elements)");
    case Kind::kBarrier:
      return "barrier()";
  }
  return "an unknown operation";
}

size_t Operation::in_bytes(int rank) const {
  return key_.kind == OperationKey::Kind::kAllGatherV ? PartCount(rank) * in_size() : in_bytes();
}

int Operation::PartOf(size_t element) const {
  if (begins.empty()) return static_cast<int>(element / count);
  return static_cast<int>(std::upper_bound(begins.begin(), begins.end(), element) - begins.begin()) - 1;
}

absl::Status Operation::Wait(absl::Time deadline) { return Done() ? status() : engine_->Wait(this, deadline); }

bool Operation::PeersCaughtUp(const ControlBlock& control) const {
  const uint64_t reached = first_round + round + 1;
  switch (phase) {
    case Phase::kCopyIn:
      return false;
    case Phase::kReduce:
      return mode == Mode::kStaged && control.AllReached(&PeerLine::copied, reached);
    case Phase::kCopyOut:
      return HasTwoSteps() && control.AllReached(&PeerLine::reduced, reached);
    case Phase::kLeave:
      return control.AllReached(&PeerLine::copied, reached);
  }
  return false;
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
