// SPDX-License-Identifier: Apache-2.0
// What mixed precision asks of a device. One implementation for each kind; all else in this layer is the same for all.
#ifndef LIBDDP_AMP_AMP_DEVICE_H_
#define LIBDDP_AMP_AMP_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/types.h"
#include "libddp/device/scale_rule.h"

namespace ddp {

// Every call but Read takes effect in the order of its stream and may return before it has; on the CPU, at once.
// Pointers are to the device's memory, buffers are on it and of floating-point types. Implementations have no state:
// any thread may call anything at any time.
class AmpDevice {
 public:
  virtual ~AmpDevice() = default;

  // Zeroed. Freed by the last owner, after what was submitted to its stream.
  virtual absl::StatusOr<std::shared_ptr<void>> Allocate(size_t bytes, Stream stream) = 0;

  // v = v * *factor for every element v, in one launch for all buffers. With `found_inf`, that becomes 1 if a v, as it
  // is stored, is an infinity or a NaN.
  virtual absl::Status Scale(Buffers values, const float* factor, uint32_t* found_inf, Stream stream) = 0;
  // The search alone: reads only.
  virtual absl::Status Check(Buffers values, uint32_t* found_inf, Stream stream) = 0;
  // UpdateScale where the numbers are.
  virtual absl::Status Update(const ScaleRule& rule, ScalerNumbers* numbers, Stream stream) = 0;
  // out = in, in out's type: float32, float16 and bfloat16 convert to each other, by one rounding to nearest even.
  // InvalidArgument for other types.
  virtual absl::Status Convert(const Buffer& in, const Buffer& out, Stream stream) = 0;

  // Between the device and the host. Read waits for what was submitted to the stream before.
  virtual absl::Status Read(const void* data, void* host, size_t bytes, Stream stream) = 0;
  virtual absl::Status Write(void* data, const void* host, size_t bytes, Stream stream) = 0;
};

// GPUs, by way of Devices().
AmpDevice& CudaAmpDevice();

// Never destroyed.
AmpDevice* AmpDeviceOf(Device device);

}  // namespace ddp

#endif  // LIBDDP_AMP_AMP_DEVICE_H_
