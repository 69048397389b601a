// SPDX-License-Identifier: Apache-2.0
#include "libddp/device/device_runtime.h"

namespace ddp {
namespace {

absl::Status NotBuilt() {
  return absl::UnimplementedError(
      "this build of libddp has no CUDA: install CUDA 12.8 or newer and configure with -DDDP_WITH_CUDA=ON");
}

class NoDevices final : public DeviceRuntime {
 public:
  absl::Status Check(Device) override { return NotBuilt(); }
  int Count() override { return 0; }
  absl::StatusOr<std::string> Identity(Device) override { return NotBuilt(); }
  absl::Status SetCurrent(Device) override { return NotBuilt(); }
  int Current() override { return -1; }
  bool InUse(int) override { return false; }
  absl::StatusOr<Device> DeviceOf(const void*) override { return Device{}; }
  absl::StatusOr<void*> CreateStream() override { return NotBuilt(); }
  void DestroyStream(void*) override {}
  absl::StatusOr<void*> CreateEvent(bool) override { return NotBuilt(); }
  void DestroyEvent(void*) override {}
  absl::Status Record(void*, void*) override { return NotBuilt(); }
  absl::Status RecordEachReplay(void*, void*) override { return NotBuilt(); }
  absl::Status WaitEachReplay(void*, void*) override { return NotBuilt(); }
  absl::Status WaitEvent(void*, void*) override { return NotBuilt(); }
  absl::StatusOr<bool> Finished(void*) override { return NotBuilt(); }
  absl::StatusOr<double> ElapsedUs(void*, void*) override { return NotBuilt(); }
  absl::StatusOr<bool> Capturing(void*) override { return NotBuilt(); }
  absl::StatusOr<uint64_t> CaptureOf(void*) override { return NotBuilt(); }
  absl::Status Drain() override { return NotBuilt(); }
  absl::Status LeaveCapturesAlone() override { return NotBuilt(); }
  absl::StatusOr<std::shared_ptr<void>> Allocate(Device, size_t) override { return NotBuilt(); }
  absl::StatusOr<std::shared_ptr<void>> AllocatePinned(size_t) override { return NotBuilt(); }
  absl::StatusOr<std::shared_ptr<void>> RegisterHost(void*, size_t) override { return NotBuilt(); }
  absl::StatusOr<SharedMemory> ShareMemory(Device, void*) override { return NotBuilt(); }
  absl::StatusOr<std::shared_ptr<void>> OpenMemory(const SharedMemory&) override { return NotBuilt(); }
  absl::StatusOr<void*> AllocateOnStream(size_t, void*) override { return NotBuilt(); }
  absl::Status FreeOnStream(void*, void*) override { return NotBuilt(); }
  absl::Status Copy(void*, const void*, size_t, void*) override { return NotBuilt(); }
  absl::Status Zero(void*, size_t, void*) override { return NotBuilt(); }
  absl::Status Run(const Transform&, absl::Span<const TransformPiece>, void*) override { return NotBuilt(); }
  absl::Status Commit(const uint32_t*, const uint32_t*, uint32_t*, uint32_t*, void*) override { return NotBuilt(); }
  absl::Status Increment(uint32_t*, void*) override { return NotBuilt(); }
  absl::Status AwaitCounter(const uint32_t*, uint32_t, const uint32_t*, uint64_t*, void*) override {
    return NotBuilt();
  }
  absl::Status NormPart(DType, NormKind, absl::Span<const TransformPiece>, double*, void*) override {
    return NotBuilt();
  }
  absl::Status FinishClip(NormKind, double, ClipNumbers*, void*) override { return NotBuilt(); }
  absl::Status Hash(absl::Span<const TransformPiece>, uint64_t*, void*) override { return NotBuilt(); }
  absl::Status RunBlocks(const blocks::Pass&, void*) override { return NotBuilt(); }
  absl::Status RunLowRank(LowRankPass, DType, const LowRankStep&, absl::Span<const LowRankMatrix>, void*) override {
    return NotBuilt();
  }
  absl::Status RunStaged(const staged::Collective&, void*) override { return NotBuilt(); }
  absl::Status RunStaged(const staged::Exchange&, void*) override { return NotBuilt(); }
  absl::Status RunStaged(const staged::Turn&, void*) override { return NotBuilt(); }
  absl::Status RunStaged(const staged::Meeting&, void*) override { return NotBuilt(); }
  absl::Status RunStaged(const staged::BlockReduction&, void*) override { return NotBuilt(); }
  absl::StatusOr<int> StagedBlocks() override { return NotBuilt(); }
  absl::Status UpdateScale(const ScaleRule&, ScalerNumbers*, void*) override { return NotBuilt(); }
};

}  // namespace

DeviceRuntime* CudaDevices() {
  static NoDevices runtime;  // it has no state
  return &runtime;
}

}  // namespace ddp
