// SPDX-License-Identifier: Apache-2.0
// Mixed precision on GPUs: everything in the order of its stream.
#include <vector>

#include "libddp/amp/amp_device.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/device/device_runtime.h"

namespace ddp {
namespace {

// One launch for every type that the buffers have.
absl::Status RunOnAll(Buffers values, bool store, Transform transform, Stream stream) {
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok()) return guard.status();
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<TransformPiece> pieces;
    for (const Buffer& b : values) {
      if (b.dtype == dtype && b.count > 0) pieces.push_back({b.data, store ? b.data : nullptr, b.count});
    }
    transform.in = transform.out = dtype;
    if (pieces.empty()) continue;
    if (absl::Status s = Devices().Run(transform, pieces, stream.native); !s.ok()) return s;
  }
  return absl::OkStatus();
}

class CudaAmp final : public AmpDevice {
 public:
  absl::StatusOr<std::shared_ptr<void>> Allocate(size_t bytes, Stream stream) override {
    if (absl::Status s = Devices().Check(stream.device); !s.ok()) return s;
    return Devices().Allocate(stream.device, bytes);
  }
  absl::Status Scale(Buffers values, const float* factor, uint32_t* found_inf, Stream stream) override {
    return RunOnAll(values, true, {.nonfinite = found_inf, .factor = factor}, stream);
  }
  absl::Status Check(Buffers values, uint32_t* found_inf, Stream stream) override {
    return RunOnAll(values, false, {.nonfinite = found_inf}, stream);
  }
  absl::Status Update(const ScaleRule& rule, ScalerNumbers* numbers, Stream stream) override {
    const DeviceGuard guard(Devices(), stream.device);
    return guard.status().ok() ? Devices().UpdateScale(rule, numbers, stream.native) : guard.status();
  }
  absl::Status Convert(const Buffer& in, const Buffer& out, Stream stream) override {
    return CopyScaled(in, out, 1, stream);
  }
  absl::Status Read(const void* data, void* host, size_t bytes, Stream stream) override {
    return Transfer(host, data, bytes, stream);
  }
  // Waits, too: the host's memory is the caller's.
  absl::Status Write(void* data, const void* host, size_t bytes, Stream stream) override {
    return Transfer(data, host, bytes, stream);
  }

 private:
  static absl::Status Transfer(void* to, const void* from, size_t bytes, Stream stream) {
    const DeviceGuard guard(Devices(), stream.device);
    if (!guard.status().ok()) return guard.status();
    absl::Status status = Devices().Copy(to, from, bytes, stream.native);
    status.Update(Synchronize(stream));
    return status;
  }
};

}  // namespace

AmpDevice& CudaAmpDevice() {
  static CudaAmp cuda;  // it has no state
  return cuda;
}

}  // namespace ddp
