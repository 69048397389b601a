// SPDX-License-Identifier: Apache-2.0
// Times operations on a GPU when a group is created, before it has a stream of its own.
#ifndef LIBDDP_COMM_RING_STOPWATCH_H_
#define LIBDDP_COMM_RING_STOPWATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/gpu/device_group.h"
#include "libddp/comm/ring/staging_ring.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// Used by one thread, with the device of `options` current. What it is given outlives it.
class Stopwatch {
 public:
  Stopwatch(ProcessGroup& control, const DeviceGroupOptions& options, StagingRing& ring)
      : control_(control), options_(options), runtime_(*options.runtime), ring_(ring) {}

  // bytes: of the array.
  absl::Status Prepare(size_t bytes);

  void* stream() const { return stream_.get(); }
  uint32_t* failed_word() const { return static_cast<uint32_t*>(words_.get()); }
  // The first so many bytes, of zeros at first.
  Buffer Array(size_t bytes) const { return {data_.get(), bytes / sizeof(float), DType::kFloat32, options_.device}; }

  // Microseconds of one operation that enqueue() puts on stream(): the mean of `repeats`, after one that is not
  // counted. An error if a rank is gone or the time-out passes; the ring is aborted then.
  absl::StatusOr<double> TimeOf(int repeats, absl::FunctionRef<absl::Status()> enqueue);

 private:
  absl::Status Await();

  ProcessGroup& control_;
  const DeviceGroupOptions& options_;
  DeviceRuntime& runtime_;
  StagingRing& ring_;
  std::shared_ptr<void> words_, data_;
  OwnedStream stream_;
  OwnedEvent begin_, end_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_RING_STOPWATCH_H_
