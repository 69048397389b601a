// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/staged_moves.h"

#include <algorithm>
#include <utility>

#include "libddp/base/owner_process.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/ring/staged_call.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/device/staged_blocks.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;
using staged::Move;

Move MoveOf(const CheckedCall& call, const StagedLimits& limits, int ranks, int blocks) {
  switch (call.key.kind) {
    case Kind::kAllReduce:
      return AllReduceMove(limits, ranks, blocks, call.count, SizeOf(call.key.in), SizeOf(call.key.out));
    case Kind::kReduceScatter:
      return Move::kReduceScatter;
    case Kind::kReduce:
      return Move::kReduce;
    case Kind::kBroadcast:
      return Move::kBroadcast;
    default:
      return Move::kAllGather;
  }
}

}  // namespace

// What is still to run would look at the ring.
StagedMoves::~StagedMoves() {
  if (!engine_.MayStillRun()) return;
  ring_->Leave();
  KeepForever(ring_);
  KeepForever(copies_);
}

absl::Status StagedMoves::Enqueue(const CheckedCall& call, void* stream) {
  const int root = call.key.root;
  const bool at_root = root == at_.rank;
  switch (call.key.kind) {
    case Kind::kAllToAll:
      return AllToAll(call, stream);
    case Kind::kAllToAllV:
      return Exchange({call.in, {call.counts.begin(), call.counts.end()}},
                      {call.out, {call.out_counts.begin(), call.out_counts.end()}}, stream);
    case Kind::kSendRecv:
      return Exchange({call.in, OneFor(call.to, call.in)}, {call.out, OneFor(call.from, call.out)}, stream);
    case Kind::kGather:
      return Exchange({call.in, OneFor(root, call.in)},
                      {call.out, std::vector<size_t>(ranks(), at_root ? Elements(call.in) : 0)}, stream);
    case Kind::kScatter:
      return Exchange({call.in, std::vector<size_t>(ranks(), at_root ? Elements(call.out) : 0)},
                      {call.out, OneFor(root, call.out)}, stream);
    default:
      return Collect(call, stream);
  }
}

absl::Status StagedMoves::Send(Buffers buffers, int peer, void* stream) {
  return Exchange({buffers, OneFor(peer, buffers)}, {{}, std::vector<size_t>(ranks())}, stream);
}

absl::Status StagedMoves::Recv(Buffers buffers, int peer, void* stream) {
  return Exchange({{}, std::vector<size_t>(ranks())}, {buffers, OneFor(peer, buffers)}, stream);
}

absl::Status StagedMoves::Barrier(void* stream) {
  staged::Collective c = {};
  c.at = at_;
  c.move = Move::kBarrier;
  c.in_size = c.out_size = 1;
  PlanTiles(blocks_, &c);
  return runtime_.RunStaged(c, stream);
}

absl::Status StagedMoves::ReduceBlocks(const BlockReduce& reduce, void* stream) {
  staged::BlockReduction c = {};
  c.at = at_;
  c.format = reduce.format;
  c.dtype = static_cast<uint8_t>(reduce.buffer.dtype);
  c.size = static_cast<int>(SizeOf(reduce.buffer.dtype));
  c.prescale = reduce.prescale;
  c.postscale = reduce.postscale;
  c.in = c.out = static_cast<char*>(reduce.buffer.data);
  c.count = reduce.buffer.count;
  PlanBlocks(blocks_, &c);
  return runtime_.RunStaged(c, stream);
}

staged::Collective StagedMoves::Prepare(const CheckedCall& call) const {
  staged::Collective c = CollectiveOf(call);
  c.at = at_;
  c.move = MoveOf(call, limits_, at_.ranks, blocks_);
  c.root = call.key.root;
  const uint64_t n = ranks();
  if (c.move == Move::kAllGather) c.count = std::max<uint64_t>(call.count, call.out_count);
  if (!call.counts.empty()) {
    for (size_t r = 0; r < n; ++r) c.part_begin[r + 1] = c.part_begin[r] + call.counts[r];
  } else {
    for (uint64_t r = 0; r <= n; ++r) c.part_begin[r] = c.count / n * r;
  }
  PlanTiles(blocks_, &c, limits_.tile);
  return c;
}

absl::Status StagedMoves::Collect(const CheckedCall& call, void* stream) {
  staged::Collective c = Prepare(call);
  const bool broadcast = c.move == Move::kBroadcast, at_root = c.root == at_.rank;
  CallSide in(runtime_, call.in, stream), out(runtime_, broadcast ? call.in : call.out, stream);
  if (!broadcast || at_root) {
    if (absl::Status s = in.Fill(true, &c.in); !s.ok()) return s;
  }
  const bool receives = broadcast ? !at_root : c.move != Move::kReduce || at_root;
  if (receives) {
    if (absl::Status s = out.Fill(false, &c.out); !s.ok()) return s;
  }
  const bool copies = c.move == Move::kAllReduceFetched;
  const uint64_t size = static_cast<uint64_t>(c.in_size);
  const absl::Status run =
      copies ? copies_->AllReduce(c, ChunkOf(limits_, c.count * size) / size, stream) : runtime_.RunStaged(c, stream);
  if (!run.ok()) return run;
  return out.StoreResult();
}

absl::Status StagedMoves::AllToAll(const CheckedCall& call, void* stream) {
  const std::vector<size_t> counts(ranks(), call.count / ranks());
  if (!Ranges(call.in).Overlaps(Ranges(call.out))) return Exchange({call.in, counts}, {call.out, counts}, stream);
  // Where a part is in place, what is sent has to be kept: it is overwritten by what arrives.
  StreamScratch kept(runtime_, stream);
  if (absl::Status s = kept.AllocateFor(call.in); !s.ok()) return s;
  if (absl::Status s = CopyPieces(runtime_, call.in, kept.buffers(), stream); !s.ok()) return s;
  return Exchange({kept.buffers(), counts}, {call.out, counts}, stream);
}

absl::Status StagedMoves::Exchange(const Parts& in, const Parts& out, void* stream) {
  const size_t me = static_cast<size_t>(at_.rank);
  staged::Exchange e = {};
  e.at = at_;
  const auto fill = [&](const Parts& parts, uint64_t* begin, uint64_t* bytes) {
    const size_t size = parts.buffers.empty() ? 1 : SizeOf(parts.buffers[0].dtype);
    size_t at = 0, own = 0;
    for (size_t r = 0; r < ranks(); ++r) {
      if (r == me) own = at;
      begin[r] = at * size;
      bytes[r] = r == me ? 0 : parts.counts[r] * size;
      at += parts.counts[r];
    }
    return own;
  };
  const size_t own_in = fill(in, e.send_begin, e.send_bytes), own_out = fill(out, e.receive_begin, e.receive_bytes);
  const absl::Status own = CopyPieces(runtime_, Slice(in.buffers, own_in, in.counts[me]),
                                      Slice(out.buffers, own_out, out.counts[me]), stream);
  if (!own.ok()) return own;
  CallSide from(runtime_, in.buffers, stream), to(runtime_, out.buffers, stream);
  if (absl::Status s = from.Fill(true, &e.in); !s.ok()) return s;
  // What lies between the parts that arrive is copied back as it was.
  if (absl::Status s = to.Fill(true, &e.out); !s.ok()) return s;
  if (absl::Status s = runtime_.RunStaged(e, stream); !s.ok()) return s;
  return to.StoreResult();
}

std::vector<size_t> StagedMoves::OneFor(int rank, Buffers buffers) const {
  std::vector<size_t> counts(ranks());
  counts[static_cast<size_t>(rank)] = Elements(buffers);
  return counts;
}

}  // namespace ddp
