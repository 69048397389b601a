// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/sync_group.h"

namespace nn {

SyncGroup::SyncGroup(std::unique_ptr<ddp::ProcessGroup> group, const Device& device)
    : group_(std::move(group)),
      device_(device.is_host() ? ddp::Device{} : group_->device()),
      stream_{device_, device.stream()} {}

void SyncGroup::Gather(const float* mine, size_t count, float* all) {
  Finish(group_->AllGather(Floats(mine, count), Floats(all, count * static_cast<size_t>(size())), stream_));
}

void SyncGroup::Sum(float* numbers, size_t count) {
  const ddp::Buffer buffer = Floats(numbers, count);
  Finish(group_->AllReduce(buffer, buffer, ddp::Sum(), stream_));
}

void SyncGroup::Finish(ddp::Work work) {
  if (absl::Status status = work.BlockStream(stream_); !status.ok()) throw SyncError(std::move(status));
}

}  // namespace nn
