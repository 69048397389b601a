// SPDX-License-Identifier: Apache-2.0
// What RunProbe finds out about an NCCL that goes wrong in a planned way, and what is made of it.
#include "libddp/comm/probe/probe.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "libddp/comm/probe/verdict.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;
using Kind = ProbeStep::Kind;

int StepAt(Kind kind, size_t bytes = 0) {
  for (int i = 0; i < kProbeStepCount; ++i) {
    const ProbeStep& s = kProbeSteps[static_cast<size_t>(i)];
    if (s.kind == kind && s.bytes == bytes) return i;
  }
  return -1;
}

// Passes rank 0's id to the others.
struct IdBox {
  std::mutex mutex;
  std::optional<nccl::UniqueId> id;
  bool closed = false;
};

struct Run {
  std::vector<ProbeResult> results;
  std::vector<std::vector<int>> steps;  // that each rank has told
};

// All ranks' probes, on threads. Connections are let go when all have ended.
Run ProbeAll(
    Job& job, const std::function<void(ProbeOptions&)>& change = [](ProbeOptions&) {},
    const std::function<absl::StatusOr<nccl::Api>(int)>& api_of = {}) {
  const auto box = std::make_shared<IdBox>();
  const auto told = std::make_shared<std::vector<std::vector<int>>>(static_cast<size_t>(job.size));
  std::vector<ProbeRun> runs(static_cast<size_t>(job.size));
  std::vector<std::thread> threads;
  for (int r = 0; r < job.size; ++r) {
    threads.emplace_back([&, r] {
      ProbeOptions options;
      options.rank = r;
      options.size = job.size;
      options.device = {Device::Kind::kCuda, static_cast<int16_t>(r)};
      options.exchange_id = [box, r](nccl::UniqueId* id) -> absl::Status {
        while (true) {
          const std::lock_guard<std::mutex> lock(box->mutex);
          if (r == 0) box->id = *id;
          if (box->closed) return absl::AbortedError("no id");
          if (box->id.has_value()) {
            *id = *box->id;
            return absl::OkStatus();
          }
        }
      };
      options.progress = [told, r](const ProbeResult& result) {
        (*told)[static_cast<size_t>(r)].push_back(result.step);
      };
      change(options);
      runs[static_cast<size_t>(r)] =
          RunProbe(job.gpus, api_of ? api_of(r) : absl::StatusOr<nccl::Api>(job.nccl.api()), options);
    });
  }
  for (std::thread& thread : threads) thread.join();
  {
    const std::lock_guard<std::mutex> lock(box->mutex);
    box->closed = true;
  }
  Run run;
  run.steps = *told;
  for (ProbeRun& r : runs) {
    run.results.push_back(r.result);
    r.connection.reset();
  }
  for (const std::string& complaint : job.gpus.complaints()) CHECK(complaint == "");
  return run;
}

void ShortLimit(ProbeOptions& options) { options.limit = TimeFor(absl::Seconds(2)); }

TEST_CASE("where NCCL works every collective passes, is timed, and nothing is left") {
  for (const int size : {1, 2, 4}) {
    CAPTURE(size);
    const FakeDevices::Held before = FakeDevices::held();
    Job job(size);
    job.gpus.elapsed_us = [] { return 7.0; };
    const Run run = ProbeAll(job);
    for (const ProbeResult& result : run.results) {
      CHECK(result.state == ProbeState::kPassed);
      CHECK(result.nccl_version == 22809);
      for (size_t i = 0; i < kProbeSteps.size(); ++i) {
        CHECK(result.micros[i] == (kProbeSteps[i].bytes > 0 && !kProbeSteps[i].timing_only ? 7.0f : 0.0f));
      }
    }
    for (const std::vector<int>& steps : run.steps) CHECK(std::is_sorted(steps.begin(), steps.end()));
    CHECK(job.nccl.live_comms() == 0);
    CHECK(FakeDevices::held() == before);
    CHECK(Judge(run.results, {}, false).verdict == ProbeVerdict::kWorks);
  }
}

TEST_CASE("the sizes that backends are compared by are timed if that is asked for") {
  Job job(2);
  job.gpus.elapsed_us = [] { return 5.0; };
  const Run run = ProbeAll(job, [](ProbeOptions& options) { options.timing = true; });
  CHECK(ComparisonTime(run.results[0].micros) == Approx(5));
  CHECK(ComparisonTime(ProbeAll(job).results[0].micros) == 0);
}

TEST_CASE("the step that goes wrong and how it does are told") {
  struct Case {
    const char* function;
    int rank;
    Mishap mishap;
    nccl::Result result;
    int skip;
    ProbeState state;
    int step;
    const char* words;
  };
  constexpr int kPerStep = 5;  // calls of a collective at one size
  const Case cases[] = {
      {"CommInitRankConfig", 1, Mishap::kFail, nccl::kSystemError, 0, ProbeState::kError, StepAt(Kind::kConnect),
       "ncclCommInitRankConfig: some error: the fake's last words"},
      {"AllReduce", 1, Mishap::kFail, nccl::kUnhandledCudaError, kPerStep, ProbeState::kError,
       StepAt(Kind::kAllReduce, size_t{512} << 10), "ncclAllReduce: unhandled cuda error"},
      {"AllReduce", 0, Mishap::kCorrupt, nccl::kSuccess, 2 * kPerStep, ProbeState::kWrongData,
       StepAt(Kind::kAllReduce, size_t{1} << 20), "element 0 of 262144 is"},
      {"AllGather", 1, Mishap::kCorrupt, nccl::kSuccess, 1, ProbeState::kWrongData, StepAt(Kind::kAllGather, 4),
       "element 0 of 2 is"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.function, c.rank);
    Job job(2);
    job.nccl.Plan(c.function, c.rank, c.mishap, c.result, c.skip);
    const Run run = ProbeAll(job, ShortLimit);
    const int failed = FirstFailure(run.results);
    REQUIRE(failed == c.rank);
    const ProbeResult& result = run.results[static_cast<size_t>(failed)];
    CHECK(result.state == c.state);
    CHECK(StepName(result.step) == StepName(c.step));
    INFO(result.text());
    CHECK(absl::StrContains(result.text(), c.words));
    CHECK(run.results[static_cast<size_t>(1 - failed)].state != ProbeState::kPassed);
    CHECK(job.nccl.live_comms() == 0);
  }
}

TEST_CASE("what hangs ends with the limit, on all ranks, wherever it hangs") {
  struct Case {
    const char* function;
    Mishap mishap;
    int step;
  };
  const Case cases[] = {
      {"CommInitRankConfig", Mishap::kHang, StepAt(Kind::kConnect)},   // the call does not return
      {"CommInitRankConfig", Mishap::kStuck, StepAt(Kind::kConnect)},  // it does, but never connects
      {"AllReduce", Mishap::kHang, StepAt(Kind::kAllReduce, 4)},
      {"AllReduce", Mishap::kStuck, StepAt(Kind::kAllReduce, 4)},
      {"AllGather", Mishap::kStuck, StepAt(Kind::kAllGather, 4)},
  };
  for (const Case& c : cases) {
    CAPTURE(c.function, static_cast<int>(c.mishap));
    const Run run = GivenTime(
        TimeFor(absl::Milliseconds(300)),
        [&](absl::Duration limit) {
          Job job(2);
          job.nccl.Plan(c.function, 1, c.mishap);
          return ProbeAll(job, [limit](ProbeOptions& options) { options.limit = limit; });
        },
        [&](const Run& one) {
          return std::all_of(one.results.begin(), one.results.end(),
                             [&](const ProbeResult& result) { return StepName(result.step) == StepName(c.step); });
        });
    for (const ProbeResult& result : run.results) {
      CHECK(result.state == ProbeState::kHang);
      CHECK(StepName(result.step) == StepName(c.step));
    }
  }
}

TEST_CASE("an asynchronous error of NCCL ends the probe") {
  Job job(2);
  job.nccl.Plan("AllReduce", 1, Mishap::kStuck);
  std::thread later([&] {
    while (job.nccl.Calls("AllReduce") < 2) absl::SleepFor(absl::Milliseconds(1));
    job.nccl.SetAsyncError(0, nccl::kRemoteError);
  });
  const Run run = ProbeAll(job, ShortLimit);
  later.join();
  CHECK(run.results[0].state == ProbeState::kError);
  CHECK(run.results[0].nccl_result == nccl::kRemoteError);
  CHECK(run.results[1].state == ProbeState::kHang);
  CHECK(FirstFailure(run.results) == 0);
}

TEST_CASE("a caller that has lost interest ends the probe") {
  Job job(2);
  job.nccl.Plan("AllReduce", 1, Mishap::kStuck);
  const Run run =
      ProbeAll(job, [](ProbeOptions& options) { options.interrupted = [] { return absl::AbortedError("enough"); }; });
  CHECK(run.results[0].state == ProbeState::kStopped);
  CHECK(run.results[0].text() == "enough");
}

TEST_CASE("without a library, or a GPU, or with an NCCL too old, the probe says so and calls nothing") {
  {
    Job job(1);
    const Run run =
        ProbeAll(job, ShortLimit, [](int) { return absl::NotFoundError("NCCL cannot be loaded (libnccl.so.2)"); });
    CHECK(run.results[0].state == ProbeState::kError);
    CHECK(run.results[0].step == StepAt(Kind::kLibrary));
    CHECK(absl::StrContains(run.results[0].text(), "cannot be loaded"));
  }
  {
    Job job(1, 21703);
    const Run run = ProbeAll(job, ShortLimit);
    CHECK(run.results[0].step == StepAt(Kind::kLibrary));
    CHECK(absl::StrContains(run.results[0].text(), "too old"));
  }
  {
    Job job(1);
    const Run run = ProbeAll(job, [](ProbeOptions& options) { options.device.index = 9; });
    CHECK(run.results[0].state == ProbeState::kError);
    CHECK(run.results[0].step == StepAt(Kind::kDevice));
    CHECK(job.nccl.Calls("CommInitRankConfig") == 0);
  }
  {
    Job job(1);
    job.gpus.allow = [](Device, size_t) { return absl::ResourceExhaustedError("cudaMalloc: out of memory"); };
    const ProbeReport report = Judge(ProbeAll(job).results, {}, false);
    CHECK(report.verdict == ProbeVerdict::kBroken);
    CHECK(report.failed_step == "starting the GPU");
    CHECK(absl::StrContains(report.cause, "memory is full"));
  }
}

// --- verdicts -------------------------------------------------------------------------------------------------------

ProbeResult Passed(float us = 100) {
  ProbeResult result;
  result.state = ProbeState::kPassed;
  result.nccl_version = 22809;
  result.micros.fill(us);
  return result;
}
ProbeResult Failed(ProbeState state, int step, const char* words = "", nccl::Result code = nccl::kSuccess) {
  ProbeResult result;
  result.nccl_version = 22809;
  result.nccl_result = code;
  result.step = step;
  result.Fail(state, words);
  return result;
}

const int kFirstSum = StepAt(Kind::kAllReduce, 4);
const int kHalfMiB = StepAt(Kind::kAllReduce, size_t{512} << 10);

TEST_CASE("P2P is blamed only where NCCL works without it") {
  const std::vector<ProbeResult> hung = {Failed(ProbeState::kHang, kFirstSum), Failed(ProbeState::kHang, kFirstSum)};
  const std::vector<ProbeResult> good = {Passed(), Passed(200)};

  CHECK(WorthTryingWithoutP2p(hung, false));
  CHECK_FALSE(WorthTryingWithoutP2p(hung, true));
  CHECK_FALSE(WorthTryingWithoutP2p(good, false));

  const ProbeReport without = Judge(hung, good, false);
  CHECK(without.verdict == ProbeVerdict::kWorksWithoutP2p);
  CHECK(without.failed_rank == 0);
  CHECK(without.failed_step == "all-reduce of 4 B");
  CHECK(without.how == "hung");
  CHECK(absl::StrContains(without.cause, "ACS"));
  CHECK(without.micros_without_p2p[5] == 200);
  CHECK(absl::StrContains(Describe(without), "NCCL_P2P_DISABLE=1"));

  const ProbeReport neither = Judge(hung, hung, false);
  CHECK(neither.verdict == ProbeVerdict::kInconclusive);
  CHECK(neither.how == "hung, and without P2P on rank 0 all-reduce of 4 B hung");
  CHECK_FALSE(absl::StrContains(Describe(neither), "ACS"));
  CHECK(Judge(hung, {}, false).verdict == ProbeVerdict::kInconclusive);  // nothing to compare with
  CHECK(Judge(hung, {}, true).verdict == ProbeVerdict::kBroken);         // P2P was not used
}

TEST_CASE("the failure that tells most is the one that is reported") {
  const ProbeResult hang = Failed(ProbeState::kHang, kFirstSum), stopped = Failed(ProbeState::kStopped, kFirstSum);
  const ProbeResult remote = Failed(ProbeState::kError, kFirstSum, "a peer has gone", nccl::kRemoteError);
  const ProbeResult wrong = Failed(ProbeState::kWrongData, kHalfMiB, "element 1"),
                    crash = Failed(ProbeState::kCrash, 5);
  CHECK(FirstFailure({{hang, remote, crash, stopped}}) == 2);
  CHECK(FirstFailure({{hang, remote, Passed(), stopped}}) == 1);
  CHECK(FirstFailure({{stopped, hang}}) == 1);
  CHECK(FirstFailure({{hang, crash, wrong}}) == 2);
  CHECK(FirstFailure({{Failed(ProbeState::kHang, 5), hang}}) == 1);
  CHECK(FirstFailure({{Passed(), Passed()}}) == -1);
}

TEST_CASE("cause and remedy go by the words, the step and what helped") {
  struct Case {
    ProbeResult result;
    const char *cause, *remedy;
  };
  const Case cases[] = {
      {Failed(ProbeState::kError, 4, "ncclMaxSharedMem 82240 exceeds device/fn maxSharedMem 79856",
              nccl::kUnhandledCudaError),
       "shared memory", "2.26.2"},
      {Failed(ProbeState::kError, kHalfMiB, "unhandled cuda error", nccl::kUnhandledCudaError), "from 512 KiB on",
       "newer NCCL"},
      {Failed(ProbeState::kCrash, kHalfMiB, "signal 11"), "from 512 KiB on", "newer NCCL"},
      {Failed(ProbeState::kHang, StepAt(Kind::kConnect)), "TCP", "NCCL_SOCKET_IFNAME"},
      {Failed(ProbeState::kWrongData, kFirstSum, "element 0"), "faulty", "Xid"},
      {Failed(ProbeState::kError, kFirstSum, "internal error"), "", "NCCL_DEBUG=INFO"},
      {Failed(ProbeState::kError, kFirstSum, "Error while creating shared memory segment /dev/shm/nccl-x",
              nccl::kSystemError),
       "/dev/shm is full", "--shm-size"},
  };
  for (const Case& c : cases) {
    const ProbeReport report = Judge({{Passed(), c.result}}, {{Passed(), c.result}}, false);
    INFO(Describe(report));
    CHECK(report.verdict == ProbeVerdict::kInconclusive);
    CHECK(report.failed_rank == 1);
    CHECK(absl::StrContains(report.cause, c.cause));
    CHECK(absl::StrContains(report.remedy, c.remedy));
  }
}

TEST_CASE("what is slow but right is used, with a warning") {
  const ProbeReport slow = Judge({{Passed(), Passed(50000)}}, {}, false);
  CHECK(slow.verdict == ProbeVerdict::kWorks);
  INFO(slow.warning);
  CHECK(absl::StrContains(slow.warning, "all-reduce of 16 MiB took 50.0 ms (0.34 GB/s)"));
  CHECK(Judge({{Passed(), Passed(5000)}}, {}, false).warning.empty());
}

TEST_CASE("a result survives the way through a line, and what cannot be one is refused") {
  ProbeResult result = Failed(ProbeState::kError, kHalfMiB, "a\tb\nc \xff \"", nccl::kSystemError);
  result.micros[3] = 12.5f;
  const std::string line = EncodeProbeResult(result);
  CHECK_FALSE(absl::StrContains(line, "\n"));
  const std::optional<ProbeResult> back = DecodeProbeResult(line);
  REQUIRE(back.has_value());
  CHECK(EncodeProbeResult(*back) == line);
  CHECK(back->text() == result.text());
  CHECK(back->micros[3] == 12.5f);
  CHECK(
      DecodeProbeResult(EncodeProbeResult(Failed(ProbeState::kError, 1, std::string(5000, 'x').c_str()))).has_value());

  const auto refused = [](ProbeResult r) { return !DecodeProbeResult(EncodeProbeResult(r)).has_value(); };
  CHECK_FALSE(refused(Passed()));
  CHECK(refused(Failed(ProbeState::kError, kProbeStepCount)));
  CHECK(refused(Failed(ProbeState::kError, -1)));
  CHECK(refused(Failed(ProbeState::kKilled, 1)));  // how should it know
  CHECK(refused(Failed(static_cast<ProbeState>(77), 1)));
  CHECK(refused(Passed(0)));  // done without having done anything
  CHECK(refused(Passed(-1)));
  CHECK(refused(Passed(std::numeric_limits<float>::quiet_NaN())));
  CHECK_FALSE(DecodeProbeResult("").has_value());
  CHECK_FALSE(DecodeProbeResult("hello").has_value());
  CHECK_FALSE(DecodeProbeResult(line + "\tmore").has_value());
  CHECK_FALSE(DecodeProbeResult("probe-2" + line.substr(7)).has_value());
}

}  // namespace
}  // namespace ddp::testing::simulated
