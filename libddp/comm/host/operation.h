// SPDX-License-Identifier: Apache-2.0
// One collective operation of the ranks of a host: the call, and how far it is.
#ifndef LIBDDP_COMM_HOST_OPERATION_H_
#define LIBDDP_COMM_HOST_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "ddp/types.h"
#include "libddp/comm/base/counted_work.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/device/cpu_reduce.h"

namespace ddp {

class Engine;
class Run;

// Life: queued -> announced to the peers -> running (all ranks have announced it, and agree) -> finished -> retired.
// The engine's mutex guards everything but the atomics; while `workers` is above 0 threads are inside Run::Advance
// without it.
class Operation final : public CountedWork {
 public:
  Operation(Engine* engine, const OperationKey& key);

  absl::Status Wait(absl::Time deadline) override;

  // --- set before the launch ---
  RangeList in, out;  // this rank's data
  // Elements of `in` (all-gather: of one rank's input; reduce-scatter and all-to-all: of all parts; all-gather with
  // counts: of all ranks' inputs together).
  size_t count = 0;
  std::vector<size_t> begins;  // all-gather with counts: where each rank's part begins in the result, and the end
  CpuReduce reduce;
  uint64_t parameters = 0;  // a hash of what else all ranks must agree on: scales, counts
  uint32_t* nonfinite = nullptr;
  int bucket = -1;
  absl::Duration timeout = absl::InfiniteDuration();
  ProgramCall called;

  // --- the engine's ---
  uint64_t sequence = 0;
  std::unique_ptr<Run> run;  // once all ranks have announced it
  int arrived = 0;           // the ranks below this have announced it
  int workers = 0;
  int64_t noticed_ns = 0;  // when it was first seen to be the oldest unfinished one: its time-out counts from here

  const OperationKey& key() const { return key_; }
  std::string Describe() const;  // "operation 7, all_reduce(avg, float32, 100 elements), bucket 3"
  // In messages.
  uint64_t number() const { return called.sequence.value_or(sequence); }
  size_t in_size() const { return SizeOf(key_.in); }  // of one element
  size_t out_size() const { return SizeOf(key_.out); }
  bool IsAllReduce() const { return key_.kind == OperationKey::Kind::kAllReduce; }
  bool IsBroadcast() const { return key_.kind == OperationKey::Kind::kBroadcast; }
  bool Reduces() const { return IsAllReduce() || key_.kind == OperationKey::Kind::kReduceScatter; }
  // Whether `in` has a part for each rank.
  bool Scatters() const {
    return key_.kind == OperationKey::Kind::kReduceScatter || key_.kind == OperationKey::Kind::kAllToAll;
  }

 private:
  ~Operation() override;

  Engine* const engine_;
  const OperationKey key_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HOST_OPERATION_H_
