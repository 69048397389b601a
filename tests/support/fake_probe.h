// SPDX-License-Identifier: Apache-2.0
// What a test tells the helpers that fake_probe.cc is, and learns of them; and a job that has such helpers.
#ifndef TESTS_SUPPORT_FAKE_PROBE_H_
#define TESTS_SUPPORT_FAKE_PROBE_H_

#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "libddp/comm/probe/probe_nccl.h"
#include "tests/support/nccl_job.h"
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
  int Count() const { return CountOf(""); }
  // How many of them, without P2P, while their rank's first was there.
  int CountBesideTheFirst() const { return CountOf("beside the first"); }

 private:
  int CountOf(const std::string& words) const {
    std::ifstream file(log_);
    int lines = 0;
    for (std::string line; std::getline(file, line);) lines += line.find(words) != std::string::npos ? 1 : 0;
    return lines;
  }
  TemporaryFolder folder_;
  const std::string log_;
};

namespace simulated {

// A job whose ranks check NCCL by such helpers. `Options` are those of what is tested.
template <typename Options>
class ProbeScenario {
 public:
  explicit ProbeScenario(int size) : job(size) {}
  ProbeScenario(const ProbeScenario&) = delete;
  ProbeScenario& operator=(const ProbeScenario&) = delete;

  // Microseconds of every operation on GPUs of this process. Helpers that pass say 10.
  void OperationsTake(double us) {
    job.gpus.elapsed_us = [us] { return us; };
  }

  Job job;
  FakeHelpers helpers;
  TemporaryFolder folder;
  std::string helper = DDP_FAKE_PROBE, cache;
  int rank_without_helper = -1;
  bool fresh = false;
  absl::Duration limit = absl::Seconds(20);
  std::function<void(Options&, int rank)> change;

 protected:
  void SetProbe(ProbeNcclOptions& options, int rank) const {
    options.limit = limit;
    options.helper = rank == rank_without_helper ? "/no/such/program" : helper;
    options.cache = cache.empty() ? "" : absl::StrCat(cache, "/", rank);
    options.fresh = fresh;
  }
  void Change(Options& options, int rank) const {
    if (change) change(options, rank);
  }
};

}  // namespace simulated
}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FAKE_PROBE_H_
