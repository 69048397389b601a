// SPDX-License-Identifier: Apache-2.0
// main() of a test on several ranks.
#define CATCH_CONFIG_EXTERNAL_INTERFACES  // version 2 of Catch2 declares listeners only then
#include <cstdio>
#include <string>

#include "tests/support/catch.h"
#include "tests/support/catch_runner.h"
#include "tests/support/gpu.h"
#include "tests/support/launch.h"

namespace ddp::testing {
namespace {

// Ends the whole job at a rank's first failed assertion. Without it the other ranks would wait for this one until a
// time-out, and mpirun for them.
class JobEnder : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& test) override { test_ = test.name; }

  AssertionEndedResult assertionEnded(const Catch::AssertionStats& stats) override {
    const Catch::AssertionResult& result = stats.assertionResult;
    // That mpirun ends this rank is another rank's failure.
    const bool ended = result.getResultType() == Catch::ResultWas::FatalErrorCondition &&
                       std::string(result.getMessage()).find("SIGTERM") != std::string::npos;
    if (!result.isOk() && !ended && UnderMpi()) {
      std::string text =
          result.hasExpression() ? result.getExpressionInMacro() + " with " + result.getExpandedExpression() : "";
      if (result.hasMessage()) text += std::string(result.getMessage());
      for (const Catch::MessageInfo& info : stats.infoMessages) text += "\n  " + info.message;
      std::fflush(stdout);
      std::fprintf(stderr, "\nrank %d failed in \"%s\"\n%s:%zu: %s\n", MpiRank(), test_.c_str(),
                   result.getSourceInfo().file, result.getSourceInfo().line, text.c_str());
      std::fflush(stderr);
      EndJob();
    }
    return AssertionEndedResult(true);
  }

 private:
  std::string test_;
};

CATCH_REGISTER_LISTENER(JobEnder)

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) {
  if (ddp::testing::TooFewGpus()) return 0;
  const int result = ddp::testing::RunTestCases(argc, argv);
  ddp::testing::FinishMpi();
  return result;
}
