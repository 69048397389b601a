// SPDX-License-Identifier: Apache-2.0
// Whether a captured sequence of operations is running, although nobody tells when its graph is launched.
#ifndef LIBDDP_COMM_GPU_GRAPH_WATCH_H_
#define LIBDDP_COMM_GPU_GRAPH_WATCH_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// Two counters in memory that the GPU writes and the host reads: a kernel before the first operation of a sequence
// increments one, a kernel behind its last operation the other. A sequence ends where the program's stream waits for
// its last operation. One that was not completed, in a capture that was given up, never runs.
//
// Sequences and other operations may have to take turns: a graph runs on the program's stream, the others on the
// group's. They run in the order in which the host launches them.
//
// RunningNs, begun and running by one thread at a time, the rest by another one.
class GraphWatch {
 public:
  // `counters`: two zeros in pinned memory.
  GraphWatch(DeviceRuntime& runtime, uint32_t* counters) : runtime_(runtime), counters_(counters) {}
  // What the group's operations use must not be used by two at once.
  absl::Status TakeTurns();
  // A graph may be launched when the group has gone: what it refers to stays.
  void Forsake();

  // Before each operation, and before the stream joins a capture for it; behind each one that is not captured.
  absl::Status Enter(void* stream, bool captured);
  absl::Status Leave(void* stream);
  // Into the capture, before an operation. Does something only for the first one of a sequence.
  absl::Status Begin(void* stream);
  // Behind the last one. Returns whether there was a sequence to end.
  absl::StatusOr<bool> End(void* stream);

  // Sequences that have begun to run.
  uint32_t begun() const { return Read(0); }
  bool running() const { return static_cast<int32_t>(begun() - Read(1)) > 0; }
  // For how long the host has seen the present one running; 0 if none is. To be asked now and then.
  int64_t RunningNs(int64_t now_ns);

 private:
  uint32_t Read(int counter) const;

  DeviceRuntime& runtime_;
  uint32_t* const counters_;  // begun, ended
  bool takes_turns() const { return others_.get() != nullptr; }
  OwnedEvent others_, replays_;  // the last operation that was not captured, the last replay; null: no turns are taken
  bool any_captured_ = false;
  uint64_t open_in_ = 0;  // the capture in which a sequence has begun
  uint32_t seen_ = 0;     // begun() at since_ns_
  int64_t since_ns_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_GRAPH_WATCH_H_
