// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/checked_group.h"

#include <bit>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/composed.h"

namespace ddp {

std::vector<size_t> CheckedCall::Begins() const {
  std::vector<size_t> begins;
  if (!counts.empty()) begins.push_back(0);
  for (const size_t n : counts) begins.push_back(begins.back() + n);
  return begins;
}

Work CheckedGroup::Start(const Call& call) {
  // One side is the root's alone; elsewhere nobody looks at it.
  const bool gather = call.kind == Call::Kind::kGather, scatter = call.kind == Call::Kind::kScatter;
  if ((gather || scatter) && call.peer != rank() && !(gather ? call.out : call.in).empty()) {
    Call own_side = call;
    (gather ? own_side.out : own_side.in) = {};
    return Start(own_side);
  }
  if (ProcessGroup* const other = Other(call)) return other->Start(call);
  if (call.kind == Call::Kind::kBarrier) {
    CheckedCall barrier;
    barrier.timeout = barrier.called.timeout = timeout();
    return StartChecked(barrier);
  }
  const CallCheck check = Check(NameOf(call.kind));
  Extent in, out;
  if (absl::Status s = check.Arguments(call, &in, &out); !s.ok()) return s;
  if (call.kind == Call::Kind::kSend || call.kind == Call::Kind::kRecv) {
    return StartMessage({call.kind == Call::Kind::kSend, call.in, call.peer, call.tag, in, call.after, timeout()});
  }
  const bool whole = call.kind == Call::Kind::kAllGatherV || call.kind == Call::Kind::kScatter;
  CheckedCall checked{.key = {.kind = call.kind, .in = in.dtype, .out = out.dtype},
                      .in = call.in,
                      .out = call.out,
                      .count = whole ? out.count : in.count,
                      .out_count = out.count,
                      .counts = call.counts,
                      .out_counts = call.out_counts,
                      .to = call.peer,
                      .from = call.from,
                      .tag = call.tag,
                      .after = call.after,
                      .timeout = timeout()};
  if (call.kind == Call::Kind::kBroadcast || HasRoot(call.kind)) checked.key.root = static_cast<uint16_t>(call.peer);
  for (const size_t count : call.counts) {
    if (call.kind == Call::Kind::kAllToAllV) break;  // each rank has its own
    checked.parameters = std::rotl(checked.parameters, 23) * 0x9e3779b97f4a7c15 + count;
  }
  if (Reduces(call.kind)) {
    if (absl::Status s = SetReduce(call.reduce, &checked); !s.ok()) return check.Error(s.message());
  }
  checked.called = {.key = checked.key, .count = checked.count, .timeout = checked.timeout};
  return IsComposed(call.kind) ? StartComposed(checked) : StartChecked(checked);
}

Work CheckedGroup::StartComposed(const CheckedCall& call) {
  switch (call.key.kind) {
    case Call::Kind::kReduceScatterV:
      return ReducePartByPart(call, [this](const CheckedCall& part) { return StartComposed(part); });
    case Call::Kind::kReduce:
      return ReduceByAllReduce(
          call, rank(), [this](const CheckedCall& all) { return StartChecked(all); }, orphans_);
    default:
      return MoveByMessages(*this, call, [this](const MessageCall& message) { return StartMessage(message); });
  }
}

absl::Status CheckedGroup::SetReduce(const ReduceOptions& options, CheckedCall* call) const {
  absl::StatusOr<CpuReduce> kernel = CpuReduce::Create({.in = call->key.in,
                                                        .out = call->key.out,
                                                        .op = options.op,
                                                        .prescale = options.prescale,
                                                        .postscale = options.postscale,
                                                        .average_over = size(),
                                                        .check_nonfinite = options.nonfinite != nullptr});
  if (!kernel.ok()) return kernel.status();
  call->key.op = options.op;
  call->key.check_nonfinite = options.nonfinite != nullptr;
  call->reduce = &options;
  call->kernel = *kernel;
  for (const double scale : {options.prescale, options.postscale}) {
    call->parameters = call->parameters * 31 + std::bit_cast<uint64_t>(scale);
  }
  return absl::OkStatus();
}

absl::StatusOr<Allocation> CheckedGroup::Allocate(size_t bytes, Device device) {
  if (absl::Status s = Check("allocate").AllocationOf(bytes, device); !s.ok()) return s;
  return AllocateHere(bytes);
}

absl::Status CheckedGroup::SetTimeout(absl::Duration timeout) {
  if (timeout <= absl::ZeroDuration()) {
    return Check("set_timeout")
        .Error(absl::StrCat("the time-out must be above 0 s, not ", absl::FormatDuration(timeout)));
  }
  timeout_ns_.store(absl::ToInt64Nanoseconds(timeout), std::memory_order_relaxed);
  return absl::OkStatus();
}

void CheckedGroup::Abort(absl::Status why) {
  Fail(absl::AbortedError(absl::StrCat(world_ranks_.NameOf(rank()), " aborted the group: ", why.message())));
}

}  // namespace ddp
