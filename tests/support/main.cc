// main() of a test in one process. Version 2 of Catch2 is compiled here.
#define CATCH_CONFIG_RUNNER
#include "tests/support/catch.h"
#include "tests/support/gpu.h"

int main(int argc, char** argv) {
  if (ddp::testing::TooFewGpus()) return 0;
  return Catch::Session().run(argc, argv);
}
