// SPDX-License-Identifier: Apache-2.0
// The steps of one model that were captured into CUDA graphs.
#ifndef LIBDDP_REDUCER_GRAPH_STEPS_H_
#define LIBDDP_REDUCER_GRAPH_STEPS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "libddp/device/device_runtime.h"
#include "libddp/reducer/gpu_timer.h"
#include "libddp/reducer/statistics.h"

namespace ddp {

// Nobody tells the host when a graph is launched, so each replay leaves something behind: the kernel that ends it adds
// 1 to a counter which the host reads, and events hold the times of the last replay. The graphs of one model work on
// the same gradients, so no two of them run at once. Not thread-safe.
class GraphSteps {
 public:
  absl::Status Create(Device device);

  // A step is being captured on `stream`. Returns what measures it, which lives as long as the model; null if nothing
  // is to be measured.
  GpuTimer* Begin(bool measure, std::shared_ptr<const BucketNames> names, Stream stream);
  bool captured() const { return captured_; }

  // For the kernel at the end of a captured step.
  uint32_t* counter() const { return static_cast<uint32_t*>(counter_.get()); }
  // How many replays have ended.
  int64_t replays() const;

  // The times of the last replay of the graph that was captured last. Nothing if they have been read before, if none
  // has ended, or if one is running.
  std::optional<MeasuredStep> Read();

  // A graph may still be destroyed when the model has gone: what it refers to stays.
  void Forsake();

 private:
  std::shared_ptr<void> counter_;  // pinned
  std::vector<std::unique_ptr<GpuTimer>> timers_;
  bool captured_ = false;
  int64_t read_ = 0;  // replays() at the last Read that found something
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_GRAPH_STEPS_H_
