// SPDX-License-Identifier: Apache-2.0
// Version 2 of Catch2 is compiled here, once, and without sanitizers, under which it takes minutes.
#define CATCH_CONFIG_RUNNER
#include "tests/support/catch_runner.h"

#include "tests/support/catch.h"

namespace ddp::testing {

int RunTestCases(int argc, char** argv) { return Catch::Session().run(argc, argv); }

}  // namespace ddp::testing
