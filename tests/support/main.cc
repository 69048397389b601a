// SPDX-License-Identifier: Apache-2.0
// main() of a test in one process.
#include "tests/support/catch_runner.h"
#include "tests/support/gpu.h"

int main(int argc, char** argv) {
  if (ddp::testing::TooFewGpus()) return 0;
  return ddp::testing::RunTestCases(argc, argv);
}
