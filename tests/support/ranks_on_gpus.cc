// SPDX-License-Identifier: Apache-2.0
// Linked with tests of ranks: what they do runs on GPUs that are none, over the hierarchical backend. Their memory is
// the host's, and passes for a GPU's.
#include <memory>
#include <utility>
#include <vector>

#include "libddp/base/env.h"
#include "libddp/comm/staged/staged_group.h"
#include "tests/support/fake_devices.h"
#include "tests/support/forwarding_group.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

constexpr int kMostRanks = 8;

FakeDevices& Gpus() {
  static auto* const gpus = [] {
    auto* const made = new FakeDevices(kMostRanks);
    made->late = [](int, int) { return false; };
    made->staged_blocks = [](int) { return 4 * kMostRanks; };
    made->host_memory_is_theirs = true;
    return made;
  }();
  return *gpus;
}

// A group on a GPU, to which all memory is that GPU's.
class GpuView final : public ForwardingGroup {
 public:
  GpuView(std::unique_ptr<ProcessGroup> group, Device gpu, std::shared_ptr<ProgressThread> progress)
      : ForwardingGroup(*group), progress_(std::move(progress)), group_(std::move(group)), gpu_(gpu) {}

  Work Start(const Call& call) override {
    const std::vector<Buffer> in = There(call.in), out = There(call.out);
    Call there = call;
    there.in = in;
    there.out = out;
    there.after = kNoStream;
    return group_->Start(there);
  }
  absl::StatusOr<Allocation> Allocate(size_t bytes, Device) override { return group_->Allocate(bytes, gpu_); }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) override {
    absl::StatusOr<std::unique_ptr<ProcessGroup>> part = group_->Split(color, key);
    if (!part.ok() || *part == nullptr) return part;
    return std::make_unique<GpuView>(*std::move(part), gpu_, progress_);
  }

 private:
  std::vector<Buffer> There(Buffers buffers) const {
    std::vector<Buffer> there(buffers.begin(), buffers.end());
    for (Buffer& b : there) b.device = gpu_;
    return there;
  }

  const std::shared_ptr<ProgressThread> progress_;
  const std::unique_ptr<ProcessGroup> group_;
  const Device gpu_;
};

absl::StatusOr<std::unique_ptr<ProcessGroup>> OnGpu(Context& context) {
  absl::StatusOr<std::unique_ptr<ProcessGroup>> control = context.world().Split(0, context.rank());
  if (!control.ok()) return control.status();
  auto progress = std::make_shared<ProgressThread>();
  DeviceGroupOptions options;
  options.device = {Device::Kind::kCuda, static_cast<int16_t>(context.rank())};
  options.timeout = context.world().timeout();
  options.progress = progress.get();
  options.runtime = &Gpus();
  options.staged_limits = ReadEnv(Env::kStagedLimits).value_or("fixed");
  absl::StatusOr<std::unique_ptr<ProcessGroup>> group = CreateStagedGroup(*std::move(control), options);
  if (!group.ok()) return group.status();
  return std::make_unique<GpuView>(*std::move(group), options.device, std::move(progress));
}

[[maybe_unused]] const bool kHere = [] {
  ranks_group = OnGpu;
  return true;
}();

}  // namespace
}  // namespace ddp::testing
