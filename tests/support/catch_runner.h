// SPDX-License-Identifier: Apache-2.0
// Catch2 itself.
#ifndef TESTS_SUPPORT_CATCH_RUNNER_H_
#define TESTS_SUPPORT_CATCH_RUNNER_H_

namespace ddp::testing {

// Runs the test cases that the command line chooses; returns what main() has to.
int RunTestCases(int argc, char** argv);

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_CATCH_RUNNER_H_
