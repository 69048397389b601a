// SPDX-License-Identifier: Apache-2.0
// What tests of DeviceRuntime on a real GPU are written with.
#ifndef TESTS_GPU_DEVICE_FIXTURE_H_
#define TESTS_GPU_DEVICE_FIXTURE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "libddp/device/device_runtime.h"
#include "tests/support/check.h"

namespace ddp::testing {

inline constexpr Device kGpu{Device::Kind::kCuda, 0};

// A stream, and memory that is written and read from the host.
class Fixture {
 public:
  Fixture() : runtime_(*CudaDevices()), guard_(runtime_, kGpu), stream_(RANK_VALUE(MakeStream(runtime_))) {}

  DeviceRuntime& runtime() { return runtime_; }
  void* stream() { return stream_.get(); }

  std::shared_ptr<void> Upload(const void* data, size_t bytes) {
    std::shared_ptr<void> memory = RANK_VALUE(runtime_.Allocate(kGpu, std::max<size_t>(bytes, 1)));
    RANK_CHECK_OK(runtime_.Copy(memory.get(), data, bytes, stream()));
    Synchronize();
    return memory;
  }
  std::vector<char> Download(const void* data, size_t bytes) {
    std::vector<char> result(bytes);
    RANK_CHECK_OK(runtime_.Copy(result.data(), data, bytes, stream()));
    Synchronize();
    return result;
  }
  uint32_t Word(const std::shared_ptr<void>& memory) {
    uint32_t word = 0;
    std::memcpy(&word, Download(memory.get(), 4).data(), 4);
    return word;
  }
  void Synchronize() {
    const OwnedEvent event = RANK_VALUE(MakeEvent(runtime_));
    RANK_CHECK_OK(runtime_.Record(event.get(), stream()));
    while (!RANK_VALUE(runtime_.Finished(event.get()))) continue;
  }

 private:
  DeviceRuntime& runtime_;
  DeviceGuard guard_;
  OwnedStream stream_;
};

}  // namespace ddp::testing

#endif  // TESTS_GPU_DEVICE_FIXTURE_H_
