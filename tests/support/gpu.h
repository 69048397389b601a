// SPDX-License-Identifier: Apache-2.0
// Tests that need GPUs are skipped, with the reason, where there are too few: by the main() of every test program.
#ifndef TESTS_SUPPORT_GPU_H_
#define TESTS_SUPPORT_GPU_H_

#include <string>

namespace ddp::testing {

// The backend that is tested: DDP_TEST_BACKEND, else nccl.
std::string GpuBackend();

// True, after saying "SKIPPED: " and why on standard output (ctest looks for it), where this machine has fewer GPUs
// than DDP_TEST_GPUS says. Without that variable no GPU is looked for.
bool TooFewGpus();

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_GPU_H_
