// SPDX-License-Identifier: Apache-2.0
// The ranks that normalise their batches together.
#ifndef EXAMPLES_NN_SYNC_GROUP_H_
#define EXAMPLES_NN_SYNC_GROUP_H_

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"
#include "ddp/process_group.h"
#include "examples/nn/device.h"

namespace nn {

// An exchange between the ranks has failed.
class SyncError : public std::runtime_error {
 public:
  explicit SyncError(absl::Status status) : std::runtime_error(status.ToString()), status_(std::move(status)) {}
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

// What synchronised layers exchange with the same layers of all ranks. All ranks make the same calls in the same order,
// as models do that are equal and have the same number of passes.
//
// It has a group of its own, made by Split. Layers wait for their sums in the middle of a backward pass, while
// gradients are reduced. In one group with these, ranks would have to agree on the order of the two.
//
// Errors are thrown as SyncError. Thread-safety: Abort may be called by any thread, the rest by one at a time.
class SyncGroup {
 public:
  // All pointers are to memory of `device`, whose stream orders the exchanges. On the CPU they have happened when the
  // call returns.
  SyncGroup(std::unique_ptr<ddp::ProcessGroup> group, const Device& device);

  int size() const { return group_->size(); }

  // all = [size(), count]: the numbers `mine` of every rank.
  void Gather(const float* mine, size_t count, float* all);
  // numbers = their sums over all ranks.
  void Sum(float* numbers, size_t count);

  ddp::ProcessGroup& group() { return *group_; }

  // Ends the exchanges of all ranks.
  void Abort(absl::Status why) { group_->Abort(std::move(why)); }

 private:
  ddp::Buffer Floats(const float* data, size_t count) const {
    return {const_cast<float*>(data), count, ddp::DType::kFloat32, device_};
  }
  void Finish(ddp::Work work);

  const std::unique_ptr<ddp::ProcessGroup> group_;
  const ddp::Device device_;
  const ddp::Stream stream_;
};

}  // namespace nn

#endif  // EXAMPLES_NN_SYNC_GROUP_H_
