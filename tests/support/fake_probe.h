// What a test tells the helpers that fake_probe.cc is, and learns of them.
#ifndef TESTS_SUPPORT_FAKE_PROBE_H_
#define TESTS_SUPPORT_FAKE_PROBE_H_

#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/support/temporary_folder.h"

namespace ddp::testing {

// One at a time. They pass unless they are told otherwise.
class FakeHelpers {
 public:
  FakeHelpers() : log_(folder_.path() + "/log") {
    setenv("FAKE_PROBE_LOG", log_.c_str(), 1);
    Tell("", "");
  }
  ~FakeHelpers() { unsetenv("FAKE_PROBE_LOG"); }
  FakeHelpers(const FakeHelpers&) = delete;
  FakeHelpers& operator=(const FakeHelpers&) = delete;

  static void Tell(const char* configured, const char* without_p2p) {
    setenv("FAKE_PROBE", configured, 1);
    setenv("FAKE_PROBE_NO_P2P", without_p2p, 1);
  }
  // How many have run so far.
  int Count() const {
    std::ifstream file(log_);
    int lines = 0;
    for (std::string line; std::getline(file, line);) ++lines;
    return lines;
  }

 private:
  TemporaryFolder folder_;
  const std::string log_;
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FAKE_PROBE_H_
