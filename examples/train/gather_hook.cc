// SPDX-License-Identifier: Apache-2.0
#include "examples/train/gather_hook.h"

#include <algorithm>
#include <cstddef>
#include <string>

namespace examples {
namespace {

// With n ranks a bucket takes n rounds. Round r < n - 1: rank r + 1 sends its bucket to rank 0. Last round: broadcast.
// Each round begins after the one before has ended, so rank 0 needs room for one bucket only.
class GatherHook final : public ddp::CommHook {
 public:
  GatherHook(nn::Device& device, int ranks) : device_(device), ranks_(ranks) {}

  std::string name() const override { return "gather"; }
  int rounds() const override { return ranks_; }

  absl::Status Prepare(ddp::ProcessGroup& group, absl::Span<const ddp::GradBucket> buckets) override {
    size_t largest = 0;
    for (const ddp::GradBucket& bucket : buckets) largest = std::max(largest, bucket.buffer.count);
    if (group.rank() == 0) received_ = device_.Allocate(largest);
    return absl::OkStatus();
  }

  absl::Status CanCapture() const override {
    return absl::FailedPreconditionError("it is made for comparisons without graphs; leave out --reduce=gather");
  }

  ddp::Work Start(ddp::ProcessGroup& group, const ddp::GradBucket& bucket, int round) override {
    const bool last = round == ranks_ - 1, is_root = group.rank() == 0;
    if (is_root && round > 0) {
      device_.AddScaled(received_.get(), static_cast<float*>(bucket.buffer.data), bucket.buffer.count,
                        last ? Scale(bucket.reduce) : 1, bucket.stream.native);
    }
    if (last) return group.Broadcast(bucket.buffer, 0, bucket.stream);
    if (is_root) {
      const ddp::Buffer received = {received_.get(), bucket.buffer.count, bucket.buffer.dtype, bucket.buffer.device};
      return group.Recv(received, round + 1, kTag, bucket.stream);
    }
    if (group.rank() == round + 1) return group.Send(bucket.buffer, 0, kTag, bucket.stream);
    return ddp::Work();
  }

 private:
  static constexpr int kTag = 0;

  float Scale(const ddp::ReduceOptions& reduce) const {
    const double divisor = reduce.op == ddp::ReduceOp::kAvg ? ranks_ : 1;
    return static_cast<float>(reduce.prescale * reduce.postscale / divisor);
  }

  nn::Device& device_;
  const int ranks_;
  std::shared_ptr<float> received_;  // on rank 0
};

}  // namespace

std::shared_ptr<ddp::CommHook> CreateGatherHook(nn::Device& device, int ranks) {
  return std::make_shared<GatherHook>(device, ranks);
}

}  // namespace examples
