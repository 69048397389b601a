// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/nccl_moves.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "libddp/comm/base/range_list.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/device/cpu_reduce.h"

namespace ddp {
namespace {

// As an element of a floating-point type.
void StoreScalar(double value, DType dtype, void* to) {
  if (dtype == DType::kFloat64) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  const float narrow = static_cast<float>(value);
  const void* const from = &narrow;
  CpuReduce::Create({.in = DType::kFloat32, .out = dtype}).value()(&from, 1, &to, 1, 1);
}

using Kind = OperationKey::Kind;

nccl::DataType TypeOf(Buffers buffers) { return nccl::ToNccl(buffers[0].dtype); }

}  // namespace

NcclMoves::NcclMoves(std::shared_ptr<NcclCommunicator> communicator, ProcessGroup& control)
    : communicator_(std::move(communicator)),
      memory_(communicator_, control),
      runtime_(*communicator_->setup().runtime),
      rank_(control.rank()),
      size_(static_cast<size_t>(control.size())) {}

uint64_t NcclMoves::Shape(const CheckedCall& call) const {
  switch (call.key.kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      return MixHash(HashOfRanges(HashOfRanges(0, call.in), call.out), Misaligned(call.in, call.out) ? 1 : 0);
    case Kind::kAllGather:
      return MixHash(HashOfRanges(HashOfRanges(0, call.in), call.out), Misaligned(call.out, call.in) ? 1 : 0);
    case Kind::kAllGatherV:
      return HashOfRanges(0, call.out);
    case Kind::kBroadcast:
    case Kind::kReduce:
      return HashOfRanges(0, call.in);
    case Kind::kAllToAll:
      return SendsFromRegistered(call.in, call.out) ? 1 : 0;
    default:
      return 0;
  }
}

absl::Status NcclMoves::Enqueue(const CheckedCall& call, void* stream) {
  const Buffers in = call.in, out = call.out;
  const int root = call.key.root;
  switch (call.key.kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      return Reduce(call, stream);
    case Kind::kReduce:
      return ReduceTo(call, stream);
    case Kind::kBroadcast:
      return Broadcast(in, root, stream);
    case Kind::kAllGather:
      return AllGather(in, out, stream);
    case Kind::kAllGatherV:
      return AllGatherV(in, out, call.counts, stream);
    case Kind::kAllToAll:
      return AllToAll(in, out, stream);
    case Kind::kAllToAllV:
      return Exchange({in, {call.counts.begin(), call.counts.end()}},
                      {out, {call.out_counts.begin(), call.out_counts.end()}}, false, stream);
    case Kind::kSendRecv:
      return Exchange({in, OneFor(call.to, Elements(in))}, {out, OneFor(call.from, Elements(out))}, false, stream);
    case Kind::kGather:
      return Gather(in, out, root, stream);
    case Kind::kScatter:
      return Scatter(in, out, root, stream);
    default:
      return absl::InternalError("an unknown operation");
  }
}

bool NcclMoves::AnyRegistered(Buffers buffers) const {
  return std::any_of(buffers.begin(), buffers.end(), [&](const Buffer& b) { return b.count > 0 && memory_.Holds(b); });
}

bool NcclMoves::Misaligned(Buffers whole, Buffers part) const {
  constexpr size_t kAlign = 4;
  const auto misaligned = [&](const Buffer& b) {
    return b.count > 0 && reinterpret_cast<uintptr_t>(b.data) % kAlign != 0 && memory_.Holds(b);
  };
  if (std::any_of(whole.begin(), whole.end(), misaligned) || std::any_of(part.begin(), part.end(), misaligned)) {
    return true;
  }
  const auto bytes = [](Buffers buffers) {
    size_t sum = 0;
    for (const Buffer& b : buffers) sum += b.count * SizeOf(b.dtype);
    return sum;
  };
  return bytes(part) < bytes(whole) && bytes(part) % kAlign != 0 && AnyRegistered(whole);
}

ReduceTransport NcclMoves::TransportOf(const CheckedCall& call) const {
  ReduceTransport transport{.ranks = static_cast<int>(size_)};
  if (call.key.kind == Kind::kReduce) return transport;
  transport.avg_keeps_symmetric =
      call.key.kind == Kind::kReduceScatter && communicator_->setup().features.avg_keeps_symmetric;
  // What is registered is so on all ranks, and so must the choice be.
  for (const Buffers buffers : {call.in, call.out}) {
    for (const Buffer& b : buffers) {
      transport.path = memory_.PathOf(b, call.count * SizeOf(call.key.in));
      if (transport.path == ReducePath::kPlain) return transport;
    }
  }
  return transport;
}

// in -(copy)-> from -(NCCL)-> to -(copy)-> out. The copies convert. Without copies `from` is `in` and `to` is `out`.
absl::Status NcclMoves::Reduce(const CheckedCall& call, void* stream) {
  const Buffers in = call.in, out = call.out;
  const bool scatter = call.key.kind == Kind::kReduceScatter;
  const ReducePlan plan = PlanReduce(call.key.in, call.key.out, *call.reduce, TransportOf(call));
  const bool other_memory = Misaligned(in, out);
  const bool copy_in = plan.convert_in || other_memory, copy_out = plan.convert_out || other_memory;
  StreamScratch before(runtime_, stream), after(runtime_, stream);
  Buffers from = in, to = out;
  if (copy_out) {
    if (absl::Status s = after.Allocate(call.out_count, plan.type, out[0].device); !s.ok()) return s;
    to = after.buffers();
  }
  if (copy_in) {
    // An all-reduce works in place in its result; the parts of a reduce-scatter have no room there.
    from = to;
    if (scatter) {
      if (absl::Status s = before.Allocate(call.count, plan.type, in[0].device); !s.ok()) return s;
      from = before.buffers();
    }
    if (absl::Status s =
            runtime_.Run({in[0].dtype, plan.type, plan.before_scale, nullptr}, PairPieces(in, from), stream);
        !s.ok()) {
      return s;
    }
  }
  if (absl::Status s = ReduceWithNccl({.scatter = scatter}, plan, from, to, stream); !s.ok()) return s;
  return StoreResult(plan, to, out, copy_out, call.reduce->nonfinite, stream);
}

// The result is the root's; elsewhere `out` may be empty. All ranks cut the calls as their inputs are, which is alike.
absl::Status NcclMoves::ReduceTo(const CheckedCall& call, void* stream) {
  const Buffers in = call.in, out = call.out;
  const int root = call.key.root;
  const ReducePlan plan = PlanReduce(call.key.in, call.key.out, *call.reduce, TransportOf(call));
  const bool here = rank_ == root;
  const bool copy_out = here && (plan.convert_out || out.size() > 1);
  StreamScratch scratch(runtime_, stream);
  if (plan.convert_in || copy_out) {
    if (absl::Status s = scratch.Allocate(call.count, plan.type, in[0].device); !s.ok()) return s;
  }
  const Buffers from = plan.convert_in ? scratch.buffers() : in;
  const Buffers to = copy_out ? scratch.buffers() : here ? out : from;
  if (plan.convert_in) {
    const absl::Status status =
        runtime_.Run({in[0].dtype, plan.type, plan.before_scale, nullptr}, PairPieces(in, from), stream);
    if (!status.ok()) return status;
  }
  if (absl::Status s = ReduceWithNccl(Goal{.root = root}, plan, from, to, stream); !s.ok()) return s;
  return here ? StoreResult(plan, to, out, copy_out, call.reduce->nonfinite, stream) : absl::OkStatus();
}

absl::Status NcclMoves::StoreResult(const ReducePlan& plan, Buffers to, Buffers out, bool copy, uint32_t* nonfinite,
                                    void* stream) {
  if (!copy && plan.after_scale == 1 && nonfinite == nullptr) return absl::OkStatus();
  std::vector<TransformPiece> pieces = PairPieces(to, out);
  if (!copy && plan.after_scale == 1) {
    for (TransformPiece& piece : pieces) piece.out = nullptr;  // a look is enough
  }
  return runtime_.Run({plan.type, out[0].dtype, plan.after_scale, nonfinite}, pieces, stream);
}

absl::Status NcclMoves::ReduceWithNccl(Goal goal, const ReducePlan& plan, Buffers from, Buffers to, void* stream) {
  using Op = ReducePlan::Op;
  const nccl::DataType type = nccl::ToNccl(plan.type);
  const bool one_call = from.size() == 1 && to.size() == 1;
  // One by one where NCCL would make one kernel of them that sums in part only, as of all-reduces. All ranks must group
  // alike, or NCCL hangs; `to` is alike on all ranks of an all-reduce.
  const bool all_reduce = !goal.scatter && goal.root < 0;
  const bool group = !one_call && (!all_reduce || communicator_->setup().features.groups_of_sums || !AnyRegistered(to));
  const auto enqueue = [&](const nccl::Api& api, nccl::Comm comm) {
    int op = plan.op == Op::kAvg       ? nccl::kAvg
             : plan.op == Op::kMin     ? nccl::kMin
             : plan.op == Op::kMax     ? nccl::kMax
             : plan.op == Op::kProduct ? nccl::kProd
                                       : nccl::kSum;
    if (plan.op == Op::kPremultiplied) {
      // The scalar has the type of the data.
      alignas(8) char scalar[8];
      StoreScalar(plan.factor, plan.type, scalar);
      const nccl::Result made = api.RedOpCreatePreMulSum(&op, scalar, type, nccl::kScalarHostImmediate, comm);
      if (made != nccl::kSuccess) return made;
    }
    nccl::Result result = nccl::kSuccess;
    const auto each = [&](nccl::Result r) { result = result == nccl::kSuccess ? r : result; };
    if (!goal.scatter) {
      for (const TransformPiece& p : PairPieces(from, to)) {
        each(goal.root < 0 ? api.AllReduce(p.in, p.out, p.count, type, op, comm, stream)
                           : api.Reduce(p.in, p.out, p.count, type, op, goal.root, comm, stream));
      }
    } else if (one_call) {
      each(api.ReduceScatter(from[0].data, to[0].data, to[0].count, type, op, comm, stream));
    } else {
      const size_t part = Elements(to);
      for (size_t r = 0; r < size_; ++r) {
        for (const TransformPiece& p : PairPieces(Slice(from, r * part, part), to)) {
          each(api.Reduce(p.in, p.out, p.count, type, op, static_cast<int>(r), comm, stream));
        }
      }
    }
    if (plan.op == Op::kPremultiplied) each(api.RedOpDestroy(op, comm));
    return result;
  };
  const absl::string_view what = goal.scatter ? "ncclReduceScatter" : goal.root >= 0 ? "ncclReduce" : "ncclAllReduce";
  return group ? Group(what, enqueue) : communicator_->Call(what, enqueue);
}

// Many small ranges, as of a model's buffers, travel as one: each call of a group costs the host time, and NCCL's
// kernel may do what is small one after the other.
absl::Status NcclMoves::Broadcast(Buffers buffers, int root, void* stream) {
  constexpr size_t kFewRanges = 4, kMostPackedBytes = size_t{1} << 20;
  const bool pack = buffers.size() > kFewRanges && Elements(buffers) * SizeOf(buffers[0].dtype) <= kMostPackedBytes;
  StreamScratch packed(runtime_, stream);
  Buffers sent = buffers;
  if (pack) {
    if (absl::Status s = packed.AllocateFor(buffers); !s.ok()) return s;
    sent = packed.buffers();
    if (rank_ == root) {
      if (absl::Status s = CopyPieces(runtime_, buffers, sent, stream); !s.ok()) return s;
    }
  }
  const absl::Status status = Group("ncclBroadcast", [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = nccl::kSuccess;
    for (const Buffer& b : sent) {
      if (b.count == 0 || result != nccl::kSuccess) continue;
      result = api.Broadcast(b.data, b.data, b.count, TypeOf(buffers), root, comm, stream);
    }
    return result;
  });
  return status.ok() && pack && rank_ != root ? CopyPieces(runtime_, sent, buffers, stream) : status;
}

absl::Status NcclMoves::AllGather(Buffers in, Buffers out, void* stream) {
  if (in.size() > 1 || out.size() > 1 || Misaligned(out, in)) {
    return AllGatherV(in, out, std::vector<size_t>(size_, Elements(in)), stream);
  }
  return communicator_->Call("ncclAllGather", [&](const nccl::Api& api, nccl::Comm comm) {
    return api.AllGather(in[0].data, out[0].data, in[0].count, TypeOf(in), comm, stream);
  });
}

// Also of equal parts, which ranks may cut differently.
absl::Status NcclMoves::AllGatherV(Buffers in, Buffers out, absl::Span<const size_t> counts, void* stream) {
  // Each rank's part is broadcast, range by range of the output, which is cut alike on all ranks. So this rank's input
  // goes to its place there first.
  std::vector<std::vector<Buffer>> parts;
  size_t begin = 0;
  for (const size_t n : counts) {
    parts.push_back(Slice(out, begin, n));
    begin += n;
  }
  if (absl::Status s = CopyPieces(runtime_, in, parts[static_cast<size_t>(rank_)], stream); !s.ok()) return s;
  return Group("ncclBroadcast", [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = nccl::kSuccess;
    for (size_t r = 0; r < size_; ++r) {
      for (const Buffer& b : parts[r]) {
        if (result != nccl::kSuccess) break;
        result = api.Broadcast(b.data, b.data, b.count, TypeOf(out), static_cast<int>(r), comm, stream);
      }
    }
    return result;
  });
}

bool NcclMoves::SendsFromRegistered(Buffers in, Buffers out) const {
  return in.size() == 1 && out.size() == 1 && in[0].data != out[0].data && memory_.Holds(in[0]) &&
         memory_.Holds(out[0]);
}

absl::Status NcclMoves::AllToAll(Buffers in, Buffers out, void* stream) {
  const std::vector<size_t> counts(size_, Elements(in) / size_);
  StreamScratch kept(runtime_, stream);
  if (!Ranges(in).Overlaps(Ranges(out))) {
    return Exchange({in, counts}, {out, counts}, SendsFromRegistered(in, out), stream);
  }
  // Where a part is in place, what is sent has to be kept: it is overwritten by what arrives.
  if (absl::Status s = kept.AllocateFor(in); !s.ok()) return s;
  if (absl::Status s = CopyPieces(runtime_, in, kept.buffers(), stream); !s.ok()) return s;
  return Exchange({kept.buffers(), counts}, {out, counts}, false, stream);
}

absl::Status NcclMoves::Gather(Buffers in, Buffers out, int root, void* stream) {
  const size_t part = Elements(in);
  return Exchange({in, OneFor(root, part)}, {out, std::vector<size_t>(size_, rank_ == root ? part : 0)}, false, stream);
}

absl::Status NcclMoves::Scatter(Buffers in, Buffers out, int root, void* stream) {
  const size_t part = Elements(out);
  return Exchange({in, std::vector<size_t>(size_, rank_ == root ? part : 0)}, {out, OneFor(root, part)}, false, stream);
}

absl::Status NcclMoves::Send(Buffers buffers, int peer, void* stream) {
  return Exchange({buffers, OneFor(peer, Elements(buffers))}, {{}, std::vector<size_t>(size_)}, false, stream);
}

absl::Status NcclMoves::Recv(Buffers buffers, int peer, void* stream) {
  return Exchange({{}, std::vector<size_t>(size_)}, {buffers, OneFor(peer, Elements(buffers))}, false, stream);
}

std::vector<size_t> NcclMoves::OneFor(int rank, size_t count) const {
  std::vector<size_t> counts(size_);
  counts[static_cast<size_t>(rank)] = count;
  return counts;
}

// A message is one piece of memory, so that its two sides need not have cut their ranges alike.
absl::Status NcclMoves::Exchange(const Parts& in, const Parts& out, bool direct, void* stream) {
  StreamScratch sent(runtime_, stream), arrived(runtime_, stream);
  const auto needs_copy = [&](Buffers b) { return b.size() > 1 || (!direct && AnyRegistered(b)); };
  Buffers from = in.buffers, to = out.buffers;
  if (needs_copy(from)) {
    if (absl::Status s = sent.AllocateFor(from); !s.ok()) return s;
    if (absl::Status s = CopyPieces(runtime_, from, sent.buffers(), stream); !s.ok()) return s;
    from = sent.buffers();
  }
  if (needs_copy(to)) {
    if (absl::Status s = arrived.AllocateFor(to); !s.ok()) return s;
    to = arrived.buffers();
  }
  const size_t me = static_cast<size_t>(rank_);
  const absl::Status own =
      CopyPieces(runtime_, Slice(from, in.Begin(me), in.counts[me]), Slice(to, out.Begin(me), out.counts[me]), stream);
  if (!own.ok()) return own;
  const auto messages = [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = nccl::kSuccess;
    for (size_t r = 0; r < size_; ++r) {
      if (r == me) continue;
      for (const Buffer& b : Slice(from, in.Begin(r), in.counts[r])) {
        if (result == nccl::kSuccess) {
          result = api.Send(b.data, b.count, TypeOf(from), static_cast<int>(r), comm, stream);
        }
      }
      for (const Buffer& b : Slice(to, out.Begin(r), out.counts[r])) {
        if (result == nccl::kSuccess) result = api.Recv(b.data, b.count, TypeOf(to), static_cast<int>(r), comm, stream);
      }
    }
    return result;
  };
  const absl::string_view what = in.buffers.empty()    ? "ncclRecv"
                                 : out.buffers.empty() ? "ncclSend"
                                                       : "ncclSend and ncclRecv";
  if (absl::Status s = Group(what, messages); !s.ok()) return s;
  return to.data() == out.buffers.data() ? absl::OkStatus() : CopyPieces(runtime_, to, out.buffers, stream);
}

absl::Status NcclMoves::Barrier(void* stream) {
  StreamScratch word(runtime_, stream);
  if (absl::Status s = word.Allocate(1, DType::kInt32, {}); !s.ok()) return s;
  void* const data = word.buffers()[0].data;
  return communicator_->Call("ncclAllReduce", [&](const nccl::Api& api, nccl::Comm comm) {
    return api.AllReduce(data, data, 1, nccl::kInt32, nccl::kSum, comm, stream);
  });
}

// One launch, whatever the calls are. A group has to be closed also after one of them has failed.
absl::Status NcclMoves::Group(absl::string_view what, Calls calls) {
  return communicator_->Call(what, [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = api.GroupStart();
    if (result != nccl::kSuccess) return result;
    result = calls(api, comm);
    const nccl::Result end = api.GroupEnd();
    return result == nccl::kSuccess ? end : result;
  });
}

}  // namespace ddp
