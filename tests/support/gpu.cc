// SPDX-License-Identifier: Apache-2.0
#include "tests/support/gpu.h"

#include <cstdio>
#include <cstdlib>

#include "libddp/device/device_runtime.h"

namespace ddp::testing {

std::string GpuBackend() {
  const char* const text = std::getenv("DDP_TEST_BACKEND");
  return text == nullptr ? "nccl" : text;
}

bool TooFewGpus() {
  const char* const text = std::getenv("DDP_TEST_GPUS");
  if (text == nullptr) return false;
  const int needed = std::atoi(text), there = CudaDevices()->Count();
  if (there >= needed) return false;
  std::printf("SKIPPED: needs %d GPU%s, this machine has %d\n", needed, needed == 1 ? "" : "s", there);
  return true;
}

}  // namespace ddp::testing
