// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/node_moves.h"

#include <algorithm>
#include <numeric>

#include "libddp/base/round.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/device/cpu_reduce.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

// Shares begin at multiples of so many elements.
constexpr size_t kPartAlign = 16;
// Of messages between GPUs. Like the tags of the program's messages, they are not compared: order alone counts.
constexpr int kMessageTag = 0;

bool IsSixteenBits(DType type) { return type == DType::kFloat16 || type == DType::kBFloat16; }

void Divide(const CpuReduce& divide, const Buffer& data) {
  const void* const in = data.data;
  divide(&in, 1, &data.data, 1, data.count);
}

absl::Status CheckFinite(DeviceRuntime& runtime, Buffers buffers, uint32_t* nonfinite, void* stream) {
  if (nonfinite == nullptr) return absl::OkStatus();
  std::vector<TransformPiece> pieces;
  for (const Buffer& b : buffers) pieces.push_back({b.data, nullptr, b.count});
  return runtime.Run({buffers[0].dtype, buffers[0].dtype, 1, nonfinite}, pieces, stream);
}

}  // namespace

NodeMoves::NodeMoves(std::shared_ptr<NodeGroups> groups, HostStage stage, std::unique_ptr<DeviceMoves> in_node,
                     ProcessGroup& control, const DeviceEngine& engine)
    : groups_(groups),
      in_node_(std::move(in_node)),
      control_(control),
      engine_(engine),
      runtime_(engine.runtime()),
      pipeline_(std::move(groups), std::move(stage), engine) {}

absl::Status NodeMoves::MayBeCaptured() const {
  return absl::InvalidArgumentError(
      "on several nodes the host takes part in each operation of the hierarchical backend. Call it outside of the "
      "capture, or use the nccl backend");
}

absl::Status NodeMoves::Enqueue(const CheckedCall& call, void* stream) {
  const int root = call.key.root;
  const size_t mine = groups_->rank() == root ? 1 : 0;
  switch (call.key.kind) {
    case Kind::kAllReduce:
      return AllReduce(call, stream);
    case Kind::kAllToAll:
      return Exchange(Each(call.in, call.count / ranks()), Each(call.out, call.count / ranks()), stream);
    case Kind::kAllToAllV:
      return Exchange({call.in, {call.counts.begin(), call.counts.end()}},
                      {call.out, {call.out_counts.begin(), call.out_counts.end()}}, stream);
    case Kind::kSendRecv:
      return Exchange(OneFor(call.to, call.in), OneFor(call.from, call.out), stream);
    case Kind::kGather:
      return Exchange(OneFor(root, call.in), Each(call.out, mine * Elements(call.in)), stream);
    case Kind::kScatter:
      return Exchange(Each(call.in, mine * Elements(call.out)), OneFor(root, call.out), stream);
    default:
      return Collect(call, stream);
  }
}

absl::Status NodeMoves::Send(Buffers buffers, int peer, void* stream) {
  return Exchange(OneFor(peer, buffers), Each({}, 0), stream);
}

absl::Status NodeMoves::Recv(Buffers buffers, int peer, void* stream) {
  return Exchange(Each({}, 0), OneFor(peer, buffers), stream);
}

absl::Status NodeMoves::Barrier(void* stream) {
  return pipeline_.Run(1, stream, [&](size_t, size_t) {
    return Chunk{.down = [] { return absl::OkStatus(); },
                 .job =
                     [groups = groups_, timeout = control_.timeout()] {
                       const absl::Status set = groups->all->SetTimeout(timeout);
                       return set.ok() ? groups->all->Barrier().Wait() : set;
                     },
                 .up = [](void*) { return absl::OkStatus(); }};
  });
}

NodeMoves::Cut NodeMoves::CutParts(const Parts& parts, size_t begin, size_t step, size_t left_out) {
  Cut cut;
  size_t part_begin = 0;
  for (size_t p = 0; p < parts.counts.size(); ++p) {
    const size_t count = parts.counts[p], first = std::min(begin, count);
    const size_t n = p == left_out ? 0 : std::min(step, count - first);
    const std::vector<Buffer> slice = Slice(parts.buffers, part_begin + first, n);
    cut.buffers.insert(cut.buffers.end(), slice.begin(), slice.end());
    cut.counts.push_back(n);
    cut.elements += n;
    part_begin += count;
  }
  return cut;
}

NodeMoves::Parts NodeMoves::OneFor(int rank, Buffers buffers) const {
  Parts parts = Each(buffers, 0);
  parts.counts[static_cast<size_t>(rank)] = Elements(buffers);
  return parts;
}

// --- all-reduce -----------------------------------------------------------------------------------------------------

// As a group on CPU memory does it: the sum of a node is neither divided nor rounded.
absl::Status NodeMoves::AllReduce(const CheckedCall& call, void* stream) {
  const ReduceOptions& options = *call.reduce;
  const DType in = call.key.in, out = call.key.out, partial = IsSixteenBits(in) ? DType::kFloat32 : in;
  const ReduceOp op = options.op == ReduceOp::kAvg ? ReduceOp::kSum : options.op;
  const bool average = options.op == ReduceOp::kAvg, floats = IsFloatingPoint(in);
  const ReduceOptions across{.op = op,
                             .postscale = average && floats ? options.postscale / groups_->size() : options.postscale};
  const absl::StatusOr<CpuReduce> sum =
      CpuReduce::Create({.in = in, .out = partial, .op = op, .prescale = options.prescale});
  if (!sum.ok()) return sum.status();
  CpuReduce divide;  // of integers
  if (average && !floats) {
    divide = *CpuReduce::Create({.in = out, .out = out, .op = ReduceOp::kAvg, .average_over = groups_->size()});
  }
  const ReduceOptions plain{.op = op};
  const size_t shares = static_cast<size_t>(groups_->shares()), local = static_cast<size_t>(groups_->local());
  const size_t step = shares * (kSlotBytes / std::max(SizeOf(partial), SizeOf(out)));
  return pipeline_.Run(CeilDiv(call.count, step), stream, [&](size_t k, size_t slot) {
    const size_t first = k * step, n = std::min(step, call.count - first);
    std::vector<size_t> counts(static_cast<size_t>(groups_->width()));
    for (size_t s = 0, each = RoundUp(CeilDiv(n, shares), kPartAlign); s < shares; ++s) {
      counts[s] = std::min(each, n - std::min(n, s * each));
    }
    const size_t mine = counts[local];
    const Buffer summed = HostBuffer(pipeline_.in_slot(slot), mine, partial),
                 result = HostBuffer(pipeline_.out_slot(slot), mine, out);
    Chunk chunk;
    chunk.down = [&, first, n, summed, counts] {
      const std::vector<Buffer> from = Slice(call.in, first, n);
      return in_node_->Enqueue({.key = {.kind = Kind::kReduceScatter, .in = in, .out = partial, .op = op},
                                .in = from,
                                .out = {&summed, 1},
                                .count = n,
                                .out_count = summed.count,
                                .counts = counts,
                                .reduce = &plain,
                                .kernel = *sum},
                               stream);
    };
    chunk.job = [groups = groups_, timeout = control_.timeout(), summed, result, across, divide, average, floats] {
      if (summed.count == 0) return absl::OkStatus();
      absl::Status status = groups->across->SetTimeout(timeout);
      if (status.ok()) status = groups->across->AllReduce(summed, result, across).Wait();
      if (status.ok() && average && !floats) Divide(divide, result);
      return groups->FromAcross(status);
    };
    chunk.up = [&, first, n, result, counts](void*) {
      const std::vector<Buffer> to = Slice(call.out, first, n);
      const absl::Status gathered = in_node_->Enqueue({.key = {.kind = Kind::kAllGatherV, .in = out, .out = out},
                                                       .in = {&result, 1},
                                                       .out = to,
                                                       .count = n,
                                                       .out_count = n,
                                                       .counts = counts},
                                                      stream);
      return gathered.ok() ? CheckFinite(runtime_, to, options.nonfinite, stream) : gathered;
    };
    return chunk;
  });
}

// --- through the host -----------------------------------------------------------------------------------------------

// The same call on CPU memory, but for its buffers and counts.
Call NodeMoves::CallOf(const CheckedCall& call) const {
  Call host{.kind = call.key.kind, .peer = call.key.root};
  if (call.reduce != nullptr) host.reduce = *call.reduce;
  host.reduce.nonfinite = nullptr;  // a GPU's
  return host;
}

// Broadcast, reduce, reduce-scatter, all-gather. A chunk has a piece of each rank's part.
absl::Status NodeMoves::Collect(const CheckedCall& call, void* stream) {
  const Kind kind = call.key.kind;
  const bool at_root = call.key.root == groups_->rank(), broadcast = kind == Kind::kBroadcast;
  const bool gives = !broadcast || at_root, takes = broadcast ? !at_root : kind != Kind::kReduce || at_root;
  const bool uneven = kind == Kind::kAllGatherV, gathers = uneven || kind == Kind::kAllGather;
  Parts in = Whole(call.in), out = Whole(broadcast ? call.in : call.out);
  if (kind == Kind::kReduceScatter) in = Each(call.in, call.out_count);
  if (gathers) out = Each(call.out, call.out_count / ranks());
  if (uneven) out.counts.assign(call.counts.begin(), call.counts.end());
  if (kind == Kind::kReduce) out.counts = in.counts;  // also where nobody looks at it
  const size_t longest = std::max(*std::max_element(in.counts.begin(), in.counts.end()),
                                  *std::max_element(out.counts.begin(), out.counts.end()));
  const size_t size = std::max(SizeOf(call.key.in), SizeOf(call.key.out));
  const size_t step = kSlotBytes / (std::max(in.counts.size(), out.counts.size()) * size);
  const Call host = CallOf(call);
  return pipeline_.Run(CeilDiv(longest, step), stream, [&](size_t k, size_t slot) {
    const auto from = std::make_shared<Cut>(CutParts(in, k * step, step));
    const auto to = std::make_shared<Cut>(CutParts(out, k * step, step));
    const Buffer host_in = HostBuffer(pipeline_.in_slot(slot), from->elements, call.key.in);
    const Buffer host_out = broadcast ? host_in : HostBuffer(pipeline_.out_slot(slot), to->elements, call.key.out);
    Chunk chunk;
    chunk.down = [&, from, host_in] {
      return gives ? CopyPieces(runtime_, from->buffers, {&host_in, 1}, stream) : absl::OkStatus();
    };
    chunk.job = [groups = groups_, timeout = control_.timeout(), host, host_in, host_out, to, uneven] {
      if (absl::Status s = groups->all->SetTimeout(timeout); !s.ok()) return s;
      Call here = host;
      here.in = {&host_in, 1};
      here.out = {&host_out, 1};
      if (uneven) here.counts = to->counts;
      return groups->all->Start(here).Wait();
    };
    chunk.up = [&, to, host_out](void*) {
      if (!takes || to->elements == 0) return absl::OkStatus();
      uint32_t* const nonfinite = call.reduce == nullptr ? nullptr : call.reduce->nonfinite;
      return CopyChecked(runtime_, {&host_out, 1}, to->buffers, nonfinite, stream);
    };
    return chunk;
  });
}

// Messages, a piece of each in a chunk. Both ends of a message cut it alike.
absl::Status NodeMoves::Exchange(const Parts& in, const Parts& out, void* stream) {
  const size_t me = static_cast<size_t>(groups_->rank());
  const auto own = [me](const Parts& parts) {
    const auto begin = parts.counts.begin();
    return Slice(parts.buffers, std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(me), size_t{0}),
                 parts.counts[me]);
  };
  if (absl::Status s = CopyPieces(runtime_, own(in), own(out), stream); !s.ok()) return s;
  const Buffers some = in.buffers.empty() ? out.buffers : in.buffers;
  if (some.empty()) return absl::OkStatus();
  const DType type = some[0].dtype;
  const size_t step = kSlotBytes / (ranks() * SizeOf(type));
  size_t longest = 0;
  for (size_t r = 0; r < ranks(); ++r) {
    if (r != me) longest = std::max({longest, in.counts[r], out.counts[r]});
  }
  return pipeline_.Run(CeilDiv(longest, step), stream, [&](size_t k, size_t slot) {
    const auto from = std::make_shared<Cut>(CutParts(in, k * step, step, me));
    const auto to = std::make_shared<Cut>(CutParts(out, k * step, step, me));
    const Buffer host_in = HostBuffer(pipeline_.in_slot(slot), from->elements, type);
    const Buffer host_out = HostBuffer(pipeline_.out_slot(slot), to->elements, type);
    Chunk chunk;
    chunk.down = [&, from, host_in] {
      return from->elements == 0 ? absl::OkStatus() : CopyPieces(runtime_, from->buffers, {&host_in, 1}, stream);
    };
    chunk.job = [groups = groups_, timeout = control_.timeout(), from, to, host_in, host_out] {
      if (absl::Status s = groups->all->SetTimeout(timeout); !s.ok()) return s;
      return SendAndReceive(*groups->all, *from, host_in, *to, host_out);
    };
    chunk.up = [&, to, host_out](void*) {
      return to->elements == 0 ? absl::OkStatus() : CopyPieces(runtime_, {&host_out, 1}, to->buffers, stream);
    };
    return chunk;
  });
}

// Receives first: a message finds its place when it comes.
absl::Status NodeMoves::SendAndReceive(ProcessGroup& group, const Cut& from, const Buffer& in, const Cut& to,
                                       const Buffer& out) {
  std::vector<Work> works;
  size_t in_begin = 0, out_begin = 0;
  for (size_t r = 0; r < to.counts.size(); out_begin += to.counts[r++]) {
    if (to.counts[r] > 0)
      works.push_back(group.Recv(Slice({&out, 1}, out_begin, to.counts[r]), static_cast<int>(r), kMessageTag));
  }
  for (size_t r = 0; r < from.counts.size(); in_begin += from.counts[r++]) {
    if (from.counts[r] > 0)
      works.push_back(group.Send(Slice({&in, 1}, in_begin, from.counts[r]), static_cast<int>(r), kMessageTag));
  }
  absl::Status status;
  for (Work& work : works) status.Update(work.Wait());
  return status;
}

}  // namespace ddp
