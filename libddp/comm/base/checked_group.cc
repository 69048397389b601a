#include "libddp/comm/base/checked_group.h"

#include <bit>

#include "absl/strings/str_cat.h"

namespace ddp {

std::vector<size_t> CheckedCall::Begins() const {
  std::vector<size_t> begins;
  if (!counts.empty()) begins.push_back(0);
  for (const size_t n : counts) begins.push_back(begins.back() + n);
  return begins;
}

Work CheckedGroup::Start(const Call& call) {
  if (ProcessGroup* const other = Other(call)) return other->Start(call);
  switch (call.kind) {
    case Call::Kind::kAllReduce:
    case Call::Kind::kReduceScatter:
      return Reduce(call);
    case Call::Kind::kBroadcast:
      return Broadcast(call);
    case Call::Kind::kAllGather:
      return AllGather(call);
    case Call::Kind::kAllGatherV:
      return AllGatherV(call);
    case Call::Kind::kAllToAll:
      return AllToAll(call);
    case Call::Kind::kBarrier:
      return StartChecked({});
    case Call::Kind::kSend:
    case Call::Kind::kRecv:
      return Message(call);
  }
  return Check("start").Error("an unknown kind of operation");
}

absl::StatusOr<Allocation> CheckedGroup::Allocate(size_t bytes, Device device) {
  if (absl::Status s = Check("allocate").AllocationOf(bytes, device); !s.ok()) return s;
  return AllocateHere(bytes);
}

void CheckedGroup::Abort(absl::Status why) {
  Fail(absl::AbortedError(absl::StrCat("rank ", rank(), " aborted the group: ", why.message())));
}

Work CheckedGroup::Reduce(const Call& call) {
  const bool scatters = call.kind == Call::Kind::kReduceScatter;
  const CallCheck check = Check(scatters ? "reduce_scatter" : "all_reduce");
  const ReduceOptions& options = call.reduce;
  Extent from, to;
  const size_t parts = scatters ? static_cast<size_t>(size()) : 1;
  if (absl::Status s = check.InOut(call.in, call.out, 1, parts, &from, &to); !s.ok()) return s;
  if (absl::Status s = check.After(call.after); !s.ok()) return s;
  absl::StatusOr<CpuReduce> kernel = CpuReduce::Create({.in = from.dtype,
                                                        .out = to.dtype,
                                                        .op = options.op,
                                                        .prescale = options.prescale,
                                                        .postscale = options.postscale,
                                                        .average_over = size(),
                                                        .check_nonfinite = options.nonfinite != nullptr});
  if (!kernel.ok()) return check.Error(kernel.status().message());
  return StartChecked(
      {.key = {.kind = scatters ? OperationKey::Kind::kReduceScatter : OperationKey::Kind::kAllReduce,
               .in = from.dtype,
               .out = to.dtype,
               .op = options.op,
               .check_nonfinite = options.nonfinite != nullptr},
       .in = call.in,
       .out = call.out,
       .count = from.count,
       .out_count = to.count,
       .reduce = &options,
       .kernel = *kernel,
       .parameters = std::bit_cast<uint64_t>(options.prescale) * 31 + std::bit_cast<uint64_t>(options.postscale),
       .after = call.after});
}

Work CheckedGroup::Broadcast(const Call& call) {
  const CallCheck check = Check("broadcast");
  Extent extent;
  if (absl::Status s = check.CheckBuffers("in", call.in, &extent); !s.ok()) return s;
  if (absl::Status s = check.Root(call.peer); !s.ok()) return s;
  if (absl::Status s = check.After(call.after); !s.ok()) return s;
  return StartChecked({.key = {.kind = OperationKey::Kind::kBroadcast,
                               .in = extent.dtype,
                               .out = extent.dtype,
                               .root = static_cast<uint16_t>(call.peer)},
                       .in = call.in,
                       .out = call.in,
                       .count = extent.count,
                       .out_count = extent.count,
                       .after = call.after});
}

Work CheckedGroup::AllGather(const Call& call) {
  const CallCheck check = Check("all_gather");
  Extent from, to;
  if (absl::Status s = check.InOut(call.in, call.out, static_cast<size_t>(size()), 1, &from, &to); !s.ok()) return s;
  if (from.dtype != to.dtype) return check.Error("in and out have different types");
  if (absl::Status s = check.After(call.after); !s.ok()) return s;
  return StartChecked({.key = {.kind = OperationKey::Kind::kAllGather, .in = from.dtype, .out = from.dtype},
                       .in = call.in,
                       .out = call.out,
                       .count = from.count,
                       .out_count = to.count,
                       .after = call.after});
}

Work CheckedGroup::AllGatherV(const Call& call) {
  const CallCheck check = Check("all_gather_v");
  Extent to;
  if (absl::Status s = check.Counts(call.in, call.out, call.counts, &to); !s.ok()) return s;
  if (absl::Status s = check.After(call.after); !s.ok()) return s;
  uint64_t parameters = 0;
  for (const size_t count : call.counts) parameters = std::rotl(parameters, 23) * 0x9e3779b97f4a7c15 + count;
  return StartChecked({.key = {.kind = OperationKey::Kind::kAllGatherV, .in = to.dtype, .out = to.dtype},
                       .in = call.in,
                       .out = call.out,
                       .count = to.count,
                       .out_count = to.count,
                       .counts = call.counts,
                       .parameters = parameters,
                       .after = call.after});
}

Work CheckedGroup::AllToAll(const Call& call) {
  const CallCheck check = Check("all_to_all");
  Extent extent;
  if (absl::Status s = check.Parts(call.in, call.out, &extent); !s.ok()) return s;
  if (absl::Status s = check.After(call.after); !s.ok()) return s;
  return StartChecked({.key = {.kind = OperationKey::Kind::kAllToAll, .in = extent.dtype, .out = extent.dtype},
                       .in = call.in,
                       .out = call.out,
                       .count = extent.count,
                       .out_count = extent.count,
                       .after = call.after});
}

Work CheckedGroup::Message(const Call& call) {
  const bool sends = call.kind == Call::Kind::kSend;
  const CallCheck check = Check(sends ? "send" : "recv");
  Extent extent;
  if (absl::Status s = check.CheckBuffers("message", call.in, &extent); !s.ok()) return s;
  if (absl::Status s = check.PeerAndTag(call.peer, call.tag); !s.ok()) return s;
  if (absl::Status s = check.After(call.after); !s.ok()) return s;
  return StartMessage({sends, call.in, call.peer, call.tag, extent, call.after});
}

}  // namespace ddp
