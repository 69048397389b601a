// SPDX-License-Identifier: Apache-2.0
// No layer of the CPU turns a NaN into a number, in float32 and in bfloat16.
#include "examples/nn/cnn.h"
#include "examples/nn/model.h"
#include "tests/support/catch.h"
#include "tests/support/nan_cases.h"

namespace {

TEST_CASE("NaN in, NaN out: every layer and every model") {
  nn::SetThreads(1);
  nn::testing::CheckLayersKeepNan(nn::Cpu());
  nn::testing::CheckModelsKeepNan(nn::Cpu());
}

TEST_CASE("NaN in, NaN out: every layer and every model, in bfloat16") {
  if (!nn::HasBfloat16()) return;
  nn::SetThreads(1);
  nn::testing::CheckCpuKeepsNanInBfloat16();
}

}  // namespace
