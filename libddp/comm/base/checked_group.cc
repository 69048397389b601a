#include "libddp/comm/base/checked_group.h"

#include <bit>

#include "absl/strings/str_cat.h"

namespace ddp {

std::vector<size_t> Call::Begins() const {
  std::vector<size_t> begins;
  if (!counts.empty()) begins.push_back(0);
  for (const size_t n : counts) begins.push_back(begins.back() + n);
  return begins;
}

absl::StatusOr<Work> CheckedGroup::AllReduce(Buffers in, Buffers out, const ReduceOptions& options, Stream after) {
  if (ProcessGroup* const other = Other(OperationKey::Kind::kAllReduce, in, out))
    return other->AllReduce(in, out, options, after);
  return Reduce(OperationKey::Kind::kAllReduce, "all_reduce", in, out, 1, options, after);
}

absl::StatusOr<Work> CheckedGroup::ReduceScatter(Buffers in, Buffers out, const ReduceOptions& options, Stream after) {
  if (ProcessGroup* const other = Other(OperationKey::Kind::kReduceScatter, in, out)) {
    return other->ReduceScatter(in, out, options, after);
  }
  return Reduce(OperationKey::Kind::kReduceScatter, "reduce_scatter", in, out, static_cast<size_t>(size()), options,
                after);
}

absl::StatusOr<Work> CheckedGroup::Broadcast(Buffers buffers, int root, Stream after) {
  if (ProcessGroup* const other = Other(OperationKey::Kind::kBroadcast, buffers, buffers)) {
    return other->Broadcast(buffers, root, after);
  }
  const CallCheck check = Check("broadcast");
  Extent extent;
  if (absl::Status s = check.CheckBuffers("in", buffers, &extent); !s.ok()) return s;
  if (absl::Status s = check.Root(root); !s.ok()) return s;
  return Start({.key = {.kind = OperationKey::Kind::kBroadcast,
                        .in = extent.dtype,
                        .out = extent.dtype,
                        .root = static_cast<uint16_t>(root)},
                .in = buffers,
                .out = buffers,
                .count = extent.count,
                .out_count = extent.count,
                .after = after});
}

absl::StatusOr<Work> CheckedGroup::AllGather(Buffers in, Buffers out, Stream after) {
  if (ProcessGroup* const other = Other(OperationKey::Kind::kAllGather, in, out))
    return other->AllGather(in, out, after);
  const CallCheck check = Check("all_gather");
  Extent from, to;
  if (absl::Status s = check.InOut(in, out, static_cast<size_t>(size()), 1, &from, &to); !s.ok()) return s;
  if (from.dtype != to.dtype) return check.Error("in and out have different types");
  return Start({.key = {.kind = OperationKey::Kind::kAllGather, .in = from.dtype, .out = from.dtype},
                .in = in,
                .out = out,
                .count = from.count,
                .out_count = to.count,
                .after = after});
}

absl::StatusOr<Work> CheckedGroup::AllGatherV(Buffers in, Buffers out, absl::Span<const size_t> counts, Stream after) {
  if (ProcessGroup* const other = Other(OperationKey::Kind::kAllGatherV, in, out))
    return other->AllGatherV(in, out, counts, after);
  Extent to;
  if (absl::Status s = Check("all_gather_v").Counts(in, out, counts, &to); !s.ok()) return s;
  uint64_t parameters = 0;
  for (const size_t count : counts) parameters = std::rotl(parameters, 23) * 0x9e3779b97f4a7c15 + count;
  return Start({.key = {.kind = OperationKey::Kind::kAllGatherV, .in = to.dtype, .out = to.dtype},
                .in = in,
                .out = out,
                .count = to.count,
                .out_count = to.count,
                .counts = counts,
                .parameters = parameters,
                .after = after});
}

absl::StatusOr<Work> CheckedGroup::AllToAll(Buffers in, Buffers out, Stream after) {
  if (ProcessGroup* const other = Other(OperationKey::Kind::kAllToAll, in, out)) return other->AllToAll(in, out, after);
  Extent extent;
  if (absl::Status s = Check("all_to_all").Parts(in, out, &extent); !s.ok()) return s;
  return Start({.key = {.kind = OperationKey::Kind::kAllToAll, .in = extent.dtype, .out = extent.dtype},
                .in = in,
                .out = out,
                .count = extent.count,
                .out_count = extent.count,
                .after = after});
}

absl::StatusOr<Work> CheckedGroup::Send(Buffers buffers, int to, int tag, Stream after) {
  if (ProcessGroup* const other = OtherForMessages(buffers)) return other->Send(buffers, to, tag, after);
  return Message(/*send=*/true, buffers, to, tag, after);
}

absl::StatusOr<Work> CheckedGroup::Recv(Buffers buffers, int from, int tag, Stream after) {
  if (ProcessGroup* const other = OtherForMessages(buffers)) return other->Recv(buffers, from, tag, after);
  return Message(/*send=*/false, buffers, from, tag, after);
}

absl::StatusOr<Allocation> CheckedGroup::Allocate(size_t bytes, Device device) {
  if (absl::Status s = Check("allocate").AllocationOf(bytes, device); !s.ok()) return s;
  return AllocateHere(bytes);
}

void CheckedGroup::Abort(absl::Status why) {
  Fail(absl::AbortedError(absl::StrCat("rank ", rank(), " aborted the group: ", why.message())));
}

absl::StatusOr<Work> CheckedGroup::Reduce(OperationKey::Kind kind, absl::string_view name, Buffers in, Buffers out,
                                          size_t out_times, const ReduceOptions& options, Stream after) {
  const CallCheck check = Check(name);
  Extent from, to;
  if (absl::Status s = check.InOut(in, out, 1, out_times, &from, &to); !s.ok()) return s;
  absl::StatusOr<CpuReduce> kernel = CpuReduce::Create({.in = from.dtype,
                                                        .out = to.dtype,
                                                        .op = options.op,
                                                        .prescale = options.prescale,
                                                        .postscale = options.postscale,
                                                        .average_over = size(),
                                                        .check_nonfinite = options.nonfinite != nullptr});
  if (!kernel.ok()) return check.Error(kernel.status().message());
  return Start(
      {.key = {.kind = kind,
               .in = from.dtype,
               .out = to.dtype,
               .op = options.op,
               .check_nonfinite = options.nonfinite != nullptr},
       .in = in,
       .out = out,
       .count = from.count,
       .out_count = to.count,
       .reduce = &options,
       .kernel = *kernel,
       .parameters = std::bit_cast<uint64_t>(options.prescale) * 31 + std::bit_cast<uint64_t>(options.postscale),
       .after = after});
}

absl::StatusOr<Work> CheckedGroup::Message(bool send, Buffers buffers, int peer, int tag, Stream after) {
  const CallCheck check = Check(send ? "send" : "recv");
  Extent extent;
  if (absl::Status s = check.CheckBuffers("message", buffers, &extent); !s.ok()) return s;
  if (absl::Status s = check.PeerAndTag(peer, tag); !s.ok()) return s;
  return StartMessage({send, buffers, peer, tag, extent, after});
}

}  // namespace ddp
