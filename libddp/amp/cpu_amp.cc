// SPDX-License-Identifier: Apache-2.0
// Mixed precision on the CPU, where streams have no meaning.
#include <cstring>

#include "libddp/amp/amp_device.h"
#include "libddp/device/cpu_reduce.h"
#include "libddp/device/cpu_scale.h"
#include "libddp/device/host_memory.h"

namespace ddp {
namespace {

class CpuAmp final : public AmpDevice {
 public:
  absl::StatusOr<std::shared_ptr<void>> Allocate(size_t bytes, Stream) override { return AllocateHost(bytes); }

  absl::Status Scale(Buffers values, const float* factor, uint32_t* found_inf, Stream) override {
    bool found = false;
    for (const Buffer& b : values) found |= CpuScale(b.dtype, b.data, b.count, *factor);
    if (found && found_inf != nullptr) *found_inf = 1;
    return absl::OkStatus();
  }

  absl::Status Check(Buffers values, uint32_t* found_inf, Stream) override {
    for (const Buffer& b : values) {
      if (CpuHasNonfinite(b.dtype, b.data, b.count)) *found_inf = 1;
    }
    return absl::OkStatus();
  }

  absl::Status Update(const ScaleRule& rule, ScalerNumbers* numbers, Stream) override {
    UpdateScale(rule, *numbers);
    return absl::OkStatus();
  }

  // The reduction of one array, which converts.
  absl::Status Convert(const Buffer& in, const Buffer& out, Stream) override {
    const absl::StatusOr<CpuReduce> convert = CpuReduce::Create({.in = in.dtype, .out = out.dtype});
    if (!convert.ok()) return convert.status();
    const void* from = in.data;
    void* to = out.data;
    (*convert)(&from, 1, &to, 1, in.count);
    return absl::OkStatus();
  }

  absl::Status Read(const void* data, void* host, size_t bytes, Stream) override {
    std::memcpy(host, data, bytes);
    return absl::OkStatus();
  }
  absl::Status Write(void* data, const void* host, size_t bytes, Stream) override {
    std::memcpy(data, host, bytes);
    return absl::OkStatus();
  }
};

}  // namespace

AmpDevice* AmpDeviceOf(Device device) {
  static CpuAmp cpu;
  return device.kind == Device::Kind::kCpu ? &cpu : &CudaAmpDevice();
}

}  // namespace ddp
