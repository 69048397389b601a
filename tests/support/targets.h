// SPDX-License-Identifier: Apache-2.0
// The instruction sets that Highway's kernels are compiled for, one after the other.
#ifndef TESTS_SUPPORT_TARGETS_H_
#define TESTS_SUPPORT_TARGETS_H_

#include <cstdint>

#include "hwy/targets.h"
#include "tests/support/catch.h"

namespace ddp::testing {

// Calls `body` once for each instruction set; kernels that are called in it use that one.
template <typename Body>
void ForEachTarget(const Body& body) {
  struct Restore {
    ~Restore() { Choose(0); }
    static void Choose(int64_t targets) {
      hwy::SetSupportedTargetsForTest(targets);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }
  } restore;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    Restore::Choose(target);
    INFO("target " << hwy::TargetName(target));
    body();
  }
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_TARGETS_H_
