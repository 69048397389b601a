// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/operation_key.h"

#include "absl/strings/str_cat.h"

namespace ddp {

absl::string_view NameOf(Call::Kind kind) {
  static constexpr absl::string_view kNames[] = {
      "all_reduce",       "reduce_scatter", "all_gather", "all_gather_v", "all_to_all",
      "reduce_scatter_v", "all_to_all_v",   "broadcast",  "reduce",       "gather",
      "scatter",          "barrier",        "send",       "recv",         "send_recv"};
  return kNames[static_cast<size_t>(kind)];
}

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
  if (kind > Kind::kBarrier) return "an unknown operation";
  if (kind == Kind::kBarrier) return "barrier()";
  const bool from = kind == Kind::kBroadcast || kind == Kind::kScatter;
  return absl::StrCat(NameOf(kind), "(", Reduces(kind) ? absl::StrCat(Name(op), ", ") : "",
                      from || HasRoot(kind) ? absl::StrCat(from ? "from rank " : "to rank ", root, ", ") : "", types,
                      kind == Kind::kAllToAllV ? "" : absl::StrCat(", ", count, " elements"),
                      kind == Kind::kAllGatherV ? " in all" : "", check_nonfinite ? ", non-finite check)" : ")");
}

absl::Status DisagreementError(uint64_t sequence, int rank, const CallSummary& call, int other_rank,
                               const CallSummary& other_call) {
  const OperationKey key = OperationKey::Unpack(call.what), other_key = OperationKey::Unpack(other_call.what);
  const char* with = "";
  if (call.what == other_call.what && call.count == other_call.count) {
    with = key.kind == OperationKey::Kind::kAllGatherV       ? " with other counts of the single ranks"
           : key.kind == OperationKey::Kind::kReduceScatterV ? " with other counts of the single ranks, or other scales"
                                                             : " with another prescale or postscale";
  }
  return absl::FailedPreconditionError(absl::StrCat("ranks disagree about operation ", sequence, ": rank ", rank,
                                                    " calls ", key.Describe(call.count), ", rank ", other_rank,
                                                    " calls ", other_key.Describe(other_call.count), with,
                                                    "; all ranks must make the same calls in the same order"));
}

}  // namespace ddp
