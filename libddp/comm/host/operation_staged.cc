// Private data passes through the stages in rounds. In a round each rank (1) copies into its stage what others need of
// its data, (2) once all have, reduces its own share from its private data and the others' stages, keeping one copy and
// leaving one in its own stage where nobody's input lies, and (3) once all have, copies the others' results out. All
// but an all-reduce is over once all have done (1): each rank takes what is its own from the others' stages. Stages
// alternate between two halves: a rank that lays out round g + 2 has seen everybody do (1) of round g + 1, and so end
// round g. A round fits the cache: that, not the number of steps, decides the speed.
#include <algorithm>

#include "libddp/comm/host/operation-inl.h"
#include "libddp/comm/host/operation.h"

namespace ddp {

// Elements that the rounds move, where ranks have unequal ones the most of any (reduce-scatter, all-to-all: of each
// part).
size_t Operation::StagedElements(int ranks) const {
  if (Scatters()) return count / static_cast<size_t>(ranks);
  if (key_.kind != OperationKey::Kind::kAllGatherV) return count;
  size_t most = 0;
  for (int r = 0; r < ranks; ++r) most = std::max(most, PartCount(r));
  return most;
}

// Elements that one round moves.
size_t Operation::RoundElements(int ranks) const {
  const size_t fit = kStageBytes / std::max(SizeOf(key_.in), SizeOf(key_.out));
  const size_t share = fit / static_cast<size_t>(ranks) / kSliceAlign * kSliceAlign;
  return Scatters() ? share : share * static_cast<size_t>(ranks);
}

// What of rank r's part of an all-gather the round that begins at `base` moves.
size_t Operation::RoundPart(int r, int ranks, size_t base) const {
  return std::min(RoundElements(ranks), PartCount(r) - std::min(base, PartCount(r)));
}

uint64_t Operation::Rounds(int ranks) const {
  return route == Route::kFetched ? 1 : CeilDiv(StagedElements(ranks), RoundElements(ranks));
}

bool Operation::RunRounds(const ControlBlock& control, SharedWriter* writer, int rank, int ranks) {
  const uint64_t rounds = Rounds(ranks);
  bool progressed = false;
  while (round < rounds) {
    const uint64_t global = first_round + round;
    switch (phase) {
      case Phase::kCopyIn:
        StageIn(control, writer, rank, ranks);
        control.peer(rank).copied.store(global + 1, std::memory_order_release);
        phase = Phase::kReduce;
        break;
      case Phase::kReduce:
        if (!control.AllReached(&PeerLine::copied, global + 1)) return progressed;
        StageReduce(control, writer, rank, ranks);
        phase = Phase::kCopyOut;
        if (HasTwoSteps()) control.peer(rank).reduced.store(global + 1, std::memory_order_release);
        break;
      case Phase::kCopyOut:
        if (HasTwoSteps() && !control.AllReached(&PeerLine::reduced, global + 1)) return progressed;
        StageOut(control, rank, ranks);
        phase = Phase::kCopyIn;
        ++round;
        break;
      case Phase::kLeave:  // a fetch's
        break;
    }
    progressed = true;
  }
  return progressed;
}

void Operation::StageIn(const ControlBlock& control, SharedWriter* writer, int rank, int ranks) const {
  const size_t size = SizeOf(key_.in), slot_size = std::max(size, SizeOf(key_.out));
  const size_t base = round * RoundElements(ranks), n = std::min(RoundElements(ranks), StagedElements(ranks) - base);
  char* const stage = control.stage(rank, first_round + round);
  switch (key_.kind) {
    case OperationKey::Kind::kAllReduce:
      for (int r = 0; r < ranks; ++r) {
        const Share share = ShareOf(n, r, ranks);
        if (r == rank || share.begin == share.end) continue;
        writer->Copy(in, (base + share.begin) * size, stage + share.begin * slot_size,
                     (share.end - share.begin) * size);
      }
      return;
    case OperationKey::Kind::kReduceScatter:
    case OperationKey::Kind::kAllToAll:
      for (int r = 0; r < ranks; ++r) {
        if (r == rank) continue;
        const size_t from = static_cast<size_t>(r) * StagedElements(ranks) + base;
        writer->Copy(in, from * size, stage + static_cast<size_t>(r) * RoundElements(ranks) * slot_size, n * size);
      }
      return;
    case OperationKey::Kind::kAllGather:
    case OperationKey::Kind::kAllGatherV:
      writer->Copy(in, base * size, stage, RoundPart(rank, ranks, base) * size);
      return;
    case OperationKey::Kind::kBroadcast:
      if (rank == key_.root) writer->Copy(in, base * size, stage, n * size);
      return;
    case OperationKey::Kind::kBarrier:
      return;
  }
}

void Operation::StageReduce(const ControlBlock& control, SharedWriter* writer, int rank, int ranks) const {
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
  const size_t out_begin = base + share.begin, out_bytes = count_here * out_size;
  // For the others it goes to the stage as well: at once, or past the caches as soon as it is here.
  char* const result = control.stage(rank, global) + in_stage;
  const bool at_once = !scatter && writer->Plain(out_bytes);
  const bool bad = ReduceLists(
      reduce, ranks,
      [&](int r, size_t at, size_t* contiguous) -> const void* {
        if (r == rank) return in.At((in_begin + at) * in_size, contiguous);
        *contiguous = (count_here - at) * in_size;
        return control.stage(r, global) + in_stage + at * in_size;
      },
      in_size, at_once ? 2 : 1,
      [&](int which, size_t at, size_t* contiguous) -> void* {
        if (which == 0) return out.At((out_begin + at) * out_size, contiguous);
        *contiguous = out_bytes - at * out_size;
        return result + at * out_size;
      },
      out_size, count_here);
  if (!scatter && !at_once) writer->Copy(out, out_begin * out_size, result, out_bytes);
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
    case OperationKey::Kind::kAllGatherV:
      for (int r = 0; r < ranks; ++r) {
        const size_t to = (PartBegin(r) + base) * size, bytes = RoundPart(r, ranks, base) * size;
        if (r == rank) {
          in.CopyTo(base * size, out, to, bytes);
        } else {
          out.CopyIn(to, control.stage(r, global), bytes);
        }
      }
      return;
    case OperationKey::Kind::kAllToAll:
      for (int r = 0; r < ranks; ++r) {
        const size_t to = (static_cast<size_t>(r) * StagedElements(ranks) + base) * size;
        if (r == rank) {
          in.CopyTo(to, out, to, n * size);
        } else {
          out.CopyIn(to, control.stage(r, global) + static_cast<size_t>(rank) * RoundElements(ranks) * size, n * size);
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
