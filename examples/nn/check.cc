// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/check.h"

#include <cstdio>
#include <cstdlib>

namespace nn::internal {

void CheckFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: contract broken by the caller: %s\n", file, line, condition);
  std::abort();
}

}  // namespace nn::internal
