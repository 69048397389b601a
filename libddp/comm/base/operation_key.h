// SPDX-License-Identifier: Apache-2.0
// What an operation is: the part of a call that all ranks must make alike.
#ifndef LIBDDP_COMM_BASE_OPERATION_KEY_H_
#define LIBDDP_COMM_BASE_OPERATION_KEY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// "all_reduce"
absl::string_view NameOf(Call::Kind kind);

inline bool Reduces(Call::Kind kind) {
  return kind == Call::Kind::kAllReduce || kind == Call::Kind::kReduceScatter || kind == Call::Kind::kReduceScatterV ||
         kind == Call::Kind::kReduce;
}
// One rank alone gives or gets the whole; `peer` of the call says which.
inline bool HasRoot(Call::Kind kind) {
  return kind == Call::Kind::kReduce || kind == Call::Kind::kGather || kind == Call::Kind::kScatter;
}

// Made of other operations in CPU memory.
inline bool IsComposed(Call::Kind kind) {
  return HasRoot(kind) || kind == Call::Kind::kReduceScatterV || kind == Call::Kind::kAllToAllV ||
         kind == Call::Kind::kSendRecv;
}

// Small enough to be compared in one word.
struct OperationKey {
  using Kind = Call::Kind;  // of a collective operation
  Kind kind = Kind::kBarrier;
  DType in = DType::kUInt8;
  DType out = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  bool check_nonfinite = false;
  uint16_t root = 0;

  uint64_t Pack() const;
  static OperationKey Unpack(uint64_t packed);
  std::string Describe(uint64_t count) const;  // "all_reduce(avg, float32, 100 elements)"
};

// What the program has called. An operation may be only a step of it; ranks compare it, and messages name it.
struct ProgramCall {
  OperationKey key;
  uint64_t count = 0;
  absl::Duration timeout = absl::InfiniteDuration();
  std::optional<uint64_t> sequence = {};  // unset: the operation's
};

// What a rank calls, as others compare it with their own calls.
struct CallSummary {
  uint64_t what;  // OperationKey::Pack
  uint64_t count;
  uint64_t parameters;  // a hash of what else must be equal: prescale and postscale, or counts

  bool operator==(const CallSummary&) const = default;
};

// What to say of two ranks whose calls differ.
absl::Status DisagreementError(uint64_t sequence, int rank, const CallSummary& call, int other_rank,
                               const CallSummary& other_call);

// What to do if a rank has left the group while others still wait for it.
inline constexpr char kLeftRemedy[] =
    "; all ranks must make the same calls in the same order (for unequal numbers of training steps, use "
    "DistributedDataParallel::Join)";

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_OPERATION_KEY_H_
