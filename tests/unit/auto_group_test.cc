// SPDX-License-Identifier: Apache-2.0
// What auto makes of GPUs whose NCCL is healthy, broken, or broken in part: by helpers that do as they are told, on
// simulated GPUs with a simulated NCCL.
#include "libddp/comm/auto_group.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "libddp/comm/probe/hierarchical_trial.h"
#include "tests/support/fake_probe.h"
#include "tests/support/logged.h"
#include "tests/support/nccl_job.h"
#include "tests/support/temporary_folder.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;
namespace fs = std::filesystem;

class Scenario : public ProbeScenario<AutoGroupOptions> {
 public:
  explicit Scenario(int size) : ProbeScenario(size) { OperationsTake(11); }
  ~Scenario() { unsetenv("NCCL_P2P_DISABLE"); }

  using Results = std::vector<absl::StatusOr<BackendChoice>>;
  // Makes the group, and sums up in it if there is one. By rank.
  Results StartAll() {
    Results results(static_cast<size_t>(job.size), absl::UnknownError(""));
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      AutoGroupOptions options;
      static_cast<NcclGroupOptions&>(options) = rank.Options();
      SetProbe(options.probe, rank.rank);
      options.nccl_started = false;  // by another test
      Change(options, rank.rank);
      absl::StatusOr<AutoGroup> made = CreateAutoGroup(std::move(control), options);
      results[static_cast<size_t>(rank.rank)] = made.ok() ? absl::StatusOr<BackendChoice>(made->choice) : made.status();
      if (made.ok()) Sum(rank, *made->group);
    });
    return results;
  }
  // The choice, which has to be the same on all ranks.
  BackendChoice Start() {
    Logged log;
    const Results results = StartAll();
    for (const absl::StatusOr<BackendChoice>& one : results) REQUIRE(one.status() == absl::OkStatus());
    const BackendChoice choice = *results[0];
    for (const absl::StatusOr<BackendChoice>& one : results) {
      CHECK(one->text == choice.text);
      CHECK(one->backend == choice.backend);
      CHECK(one->failed_rank == choice.failed_rank);
    }
    // Rank 0 says once what is not as it should be.
    CHECK(log.Count({"backend " + choice.backend, choice.failure, choice.cause, choice.remedy}) ==
          (choice.failure.empty() ? 0 : 1));
    const char* const p2p = std::getenv("NCCL_P2P_DISABLE");
    CHECK((p2p != nullptr && std::string(p2p) == "1") == choice.without_p2p);
    return choice;
  }

  static void Sum(Rank& rank, ProcessGroup& group) {
    Array x(rank, group, DType::kFloat32, 1000, false);
    for (size_t i = 0; i < 1000; ++i) x.Set(i, static_cast<double>(rank.rank + 1));
    RANK_CHECK_OK(group.AllReduce(x.whole(), x.whole(), ddp::Sum(), kNoStream).Wait());
    RANK_CHECK_EQ(x.Get(999), rank.size * (rank.size + 1) / 2.0);
  }
};

TEST_CASE("what the helpers find decides, on all ranks alike") {
  struct Case {
    const char *configured, *without_p2p;
    double hierarchical_us;
    const char* backend;
    bool without_p2p_chosen;
    int failed_rank;
    std::vector<const char*> words;
  };
  const Case cases[] = {
      {"pass", "error", 9, "nccl", false, -1, {"backend nccl: NCCL works"}},
      {"slow", "error", 9, "nccl", false, -1, {"took 100.0 ms"}},
      {"hung", "pass", 11, "nccl", true, 0, {"nccl without P2P", "512 KiB hung", "ACS", "set NCCL_P2P_DISABLE=1"}},
      {"1=error,hang", "pass", 11, "nccl", true, 1, {"512 KiB failed (unhandled cuda error)"}},
      {"1=wrong,pass", "pass", 9, "hierarchical", false, 1, {"wrong data", "9 us instead of 10 us"}},
      {"error", "error", 9, "hierarchical", false, 0, {"has not been shown", "unhandled cuda error"}},
      {"1=crash,hang", "1=wrong,pass", 9, "hierarchical", false, 1, {"crashed (signal 11"}},
      {"1=error,pass", "0=hung,pass", 9, "hierarchical", false, 1, {"512 KiB failed"}},
  };
  for (const Case& c : cases) {
    for (const int size : {2, 4}) {
      // Trials of the hierarchical backend take simulated GPUs some time.
      if (size == 4 && c.failed_rank >= 0 && &c != std::end(cases) - 1) continue;
      CAPTURE(size, c.configured, c.without_p2p);
      Scenario scenario(size);
      scenario.OperationsTake(c.hierarchical_us);
      FakeHelpers::Tell(c.configured, c.without_p2p);
      if (std::string(c.configured) == "slow") {  // is a warning, and no failure
        Logged log;
        CHECK(scenario.StartAll()[0]->backend == "nccl");
        CHECK(log.Count({c.words[0]}) == 1);
        continue;
      }
      const BackendChoice choice = scenario.Start();
      INFO(choice.text);
      CHECK(choice.backend == c.backend);
      CHECK(choice.without_p2p == c.without_p2p_chosen);
      CHECK(choice.failed_rank == c.failed_rank);
      CHECK(choice.failed_step ==
            (c.failed_rank < 0
                 ? ""
                 : std::string("all-reduce of ") + (absl::StrContains(c.configured, "crash") ? "4 B" : "512 KiB")));
      for (const char* const word : c.words) CHECK(absl::StrContains(choice.text, word));
      CHECK((scenario.job.nccl.Calls("CommInitRankConfig") > 0) == (choice.backend == "nccl"));
    }
  }
}

TEST_CASE("helpers that are missing or killed: NCCL is tried in the process, and what fails there is left") {
  struct Case {
    const char* helpers;
    int without_helper;
    const char* function;
    Mishap mishap;
    const char* words;
    double seconds;
  };
  const Case cases[] = {
      {"pass", 1, "", Mishap::kFail, "rank 1 has none", 20},
      {"1=killed,hang", -1, "", Mishap::kFail, "signal 9", 20},
      {"pass", 1, "CommInitRankConfig", Mishap::kFail, "connecting the ranks failed", 20},
      {"pass", 0, "CommInitRankConfig", Mishap::kHang, "connecting the ranks hung", 2},
      {"pass", 0, "AllReduce", Mishap::kStuck, "all-reduce of 4 B hung", 2},
      {"pass", 0, "AllReduce", Mishap::kCorrupt, "wrong data", 20},
      {"1=killed,hang", -1, "AllGather", Mishap::kFail, "all-gather of 4 B failed", 20},
  };
  for (const Case& c : cases) {
    CAPTURE(c.helpers, c.function, c.words);
    const bool healthy = std::string(c.function).empty();
    const auto start = [&](absl::Duration limit) {
      Scenario scenario(2);
      FakeHelpers::Tell(c.helpers, "pass");
      scenario.rank_without_helper = c.without_helper;
      scenario.limit = limit;
      if (!healthy) scenario.job.nccl.Plan(c.function, 1, c.mishap);
      return scenario.Start();
    };
    const BackendChoice choice = GivenTime(TimeFor(absl::Seconds(c.seconds)), start, [&](const BackendChoice& made) {
      return absl::StrContains(made.text, c.words);
    });
    INFO(choice.text);
    CHECK(choice.backend == (healthy ? "nccl" : "hierarchical"));
    CHECK(choice.without_p2p == false);  // it is too late for that
    CHECK(absl::StrContains(choice.text, c.words));
    CHECK(absl::StrContains(choice.text, "without ddp_probe"));
  }
}

TEST_CASE("NCCL that fails after its check had passed gives way, too, and the next start checks again") {
  struct Case {
    const char* function;
    Mishap mishap;
    double seconds;
  };
  for (const Case& c : {Case{"CommInitRankConfig", Mishap::kFail, 20}, Case{"CommInitRankConfig", Mishap::kHang, 0.5},
                        Case{"AllReduce", Mishap::kCorrupt, 20}, Case{"AllReduce", Mishap::kStuck, 0.5}}) {
    CAPTURE(c.function, static_cast<int>(c.mishap));
    Scenario scenario(2);
    scenario.cache = scenario.folder.path();
    CHECK(scenario.Start().backend == "nccl");
    CHECK(scenario.Start().from_cache);
    CHECK(scenario.helpers.Count() == 2);

    scenario.limit = TimeFor(absl::Seconds(c.seconds));
    scenario.job.nccl.Plan(c.function, 1, c.mishap);
    const BackendChoice choice = scenario.Start();
    INFO(choice.text);
    CHECK(choice.backend == "hierarchical");
    CHECK_FALSE(choice.from_cache);
    CHECK(absl::StrContains(choice.failed_step, "after the check had passed"));
    CHECK_FALSE(choice.remedy.empty());
    CHECK(choice.cause.empty() == (c.mishap == Mishap::kFail));
    CHECK(scenario.helpers.Count() == 2);

    scenario.limit = absl::Seconds(20);
    CHECK_FALSE(scenario.Start().from_cache);
    CHECK(scenario.helpers.Count() == 4);
  }
}

TEST_CASE("what the check had found against P2P is still said when NCCL without it fails, too") {
  Scenario scenario(2);
  FakeHelpers::Tell("1=hung,pass", "pass");
  scenario.OperationsTake(11);
  scenario.job.nccl.Plan("CommInitRankConfig", 1, Mishap::kFail);
  const auto results = scenario.StartAll();
  REQUIRE(results[0].status() == absl::OkStatus());
  const BackendChoice& choice = *results[0];
  INFO(choice.text);
  CHECK(choice.backend == "hierarchical");
  CHECK(absl::StrContains(choice.failed_step, "after the check had passed"));
  CHECK(absl::StrContains(choice.failure, "with P2P, before, on rank 1 all-reduce of 512 KiB hung"));
  CHECK(absl::StrContains(choice.cause, "PCIe ACS"));
  CHECK(absl::StrContains(choice.remedy, "set NCCL_P2P_DISABLE=1"));
}

using Results = Scenario::Results;

// Two ranks start in `timeout`; or in more, where not all start and say all `words`. `helpers`: what they are told.
Results StartWithin(absl::Duration timeout, std::unique_ptr<Scenario>* scenario,
                    const std::pair<const char*, const char*>& helpers, const std::vector<const char*>& words) {
  const auto start = [&](absl::Duration time) {
    unsetenv("NCCL_P2P_DISABLE");
    scenario->reset();
    *scenario = std::make_unique<Scenario>(2);
    FakeHelpers::Tell(helpers.first, helpers.second);
    (*scenario)->job.timeout = time;
    (*scenario)->cache = (*scenario)->folder.path();
    (*scenario)->change = [](AutoGroupOptions& options, int) {
      options.probe.least = TimeFor(absl::Milliseconds(500));
    };
    return (*scenario)->StartAll();
  };
  const Results results = GivenTime(timeout, start, [&](const Results& all) {
    return std::all_of(all.begin(), all.end(), [&](const absl::StatusOr<BackendChoice>& one) {
      return one.ok() && std::all_of(words.begin(), words.end(),
                                     [&](const char* word) { return absl::StrContains(one->text, word); });
    });
  });
  for (const absl::StatusOr<BackendChoice>& one : results) REQUIRE(one.status() == absl::OkStatus());
  CHECK(results[0]->text == results[1]->text);
  return results;
}

TEST_CASE("a short time-out: a slow start is no hang, and what hangs is not taken for proven") {
  std::unique_ptr<Scenario> scenario;
  // Later than half of the time-out.
  CHECK(StartWithin(absl::Seconds(2), &scenario, {"late", "pass"}, {"nccl"})[0]->backend == "nccl");

  const char* const p2p = "the time was too short, or the GPUs cannot use each other's memory";
  const BackendChoice choice = *StartWithin(TimeFor(absl::Seconds(3)), &scenario, {"hang", "pass"}, {p2p})[0];
  INFO(choice.text);
  CHECK(absl::StrContains(choice.failure, "hung (it had "));
  CHECK(absl::StrContains(choice.cause, p2p));
  CHECK(absl::StrContains(choice.remedy, "raise DDP_TIMEOUT; set NCCL_P2P_DISABLE=1"));
  FakeHelpers::Tell("pass", "pass");
  unsetenv("NCCL_P2P_DISABLE");
  scenario->job.timeout = absl::Seconds(60);
  const BackendChoice next = scenario->Start();
  CHECK_FALSE(next.from_cache);
  CHECK_FALSE(next.without_p2p);

  // Both attempts use the time up: the hierarchical backend still gets enough.
  const char* const tcp = "the time was too short, or ranks cannot reach each other by TCP";
  const BackendChoice last = *StartWithin(TimeFor(absl::Seconds(3)), &scenario, {"hang", "hang"}, {tcp})[0];
  CHECK(last.backend == "hierarchical");
  CHECK(absl::StrContains(last.text, tcp));
}

TEST_CASE("an attempt gets half of what is left, and never less than it needs") {
  const absl::Duration usual = absl::Seconds(30), least = absl::Seconds(5);
  CHECK_FALSE(TimeOfAttempt(usual, absl::InfiniteFuture(), least).is_short);
  CHECK(TimeOfAttempt(usual, absl::Now() + absl::Minutes(10), least).time == usual);
  CHECK_FALSE(TimeOfAttempt(usual, absl::Now() + absl::Seconds(59), least).is_short);
  CHECK(TimeOfAttempt(usual, absl::Now() + absl::Seconds(3), least).time == least);
  CHECK(TimeOfAttempt(usual, absl::Now() - absl::Seconds(3), least).time == least);
  CHECK(TimeOfAttempt(usual, absl::Now() - absl::Seconds(3), least).is_short);
  CHECK(TimeOfAttempt(absl::Seconds(1), absl::Now(), least).time == absl::Seconds(1));
}

TEST_CASE("what comes after NCCL is tried out before it is used") {
  const auto no_room = [](Scenario& scenario) { scenario.job.gpus.staged_blocks = [](int) { return 1; }; };
  const auto fails_on_rank_1 = [](Scenario& scenario) {
    scenario.job.gpus.fail = [](absl::string_view call, int device) {
      return call == "RunStaged" && device == 1 ? absl::InternalError("no such kernel") : absl::OkStatus();
    };
  };
  struct Case {
    std::function<void(Scenario&)> plant;
    const char* words;
  };
  for (const Case& c : {Case{no_room, "too few"}, Case{fails_on_rank_1, "no such kernel"}}) {
    CAPTURE(c.words);
    Scenario broken(2);
    c.plant(broken);
    FakeHelpers::Tell("1=error,pass", "error");
    for (const absl::StatusOr<BackendChoice>& one : broken.StartAll()) {
      CheckStatus(__FILE__, __LINE__, "CreateAutoGroup", one.status(), absl::StatusCode::kFailedPrecondition,
                  {"no backend works", "on rank 1 all-reduce of 512 KiB failed (unhandled cuda error)", c.words});
    }
    Scenario without_p2p(2);
    c.plant(without_p2p);
    without_p2p.OperationsTake(9);
    FakeHelpers::Tell("1=error,pass", "pass");
    CHECK(without_p2p.Start().without_p2p);
  }
}

TEST_CASE("where NCCL fails between hosts, their GPUs go through host memory and the network") {
  Scenario scenario(2);
  scenario.job.hosts = 2;
  FakeHelpers::Tell("1=error,pass", "error");
  CHECK(scenario.Start().backend == "hierarchical");
}

TEST_CASE("a trial of a group finds wrong data, and ends on all ranks") {
  Job job(2);
  job.gpus.elapsed_us = [] { return 3.0; };
  job.nccl.Plan("AllReduce", 1, Mishap::kCorrupt, nccl::kSuccess, 3 + 5);  // behind the warm-up and the step of 4 B
  job.Run([](Rank& rank, ProcessGroup& group) {
    if (group.backend() != "nccl") return;
    const ProbeResult result = TryGroup(group, rank.gpus, false);
    RANK_CHECK_EQ(StepName(result.step), rank.rank == 1 ? "all-reduce of 512 KiB" : StepName(result.step));
    RANK_CHECK(result.state == (rank.rank == 1 ? ProbeState::kWrongData : ProbeState::kError), result.text());
    RANK_CHECK(!group.status().ok());
  });
  Job healthy(2);
  healthy.gpus.elapsed_us = [] { return 3.0; };
  healthy.Run([](Rank& rank, ProcessGroup& group) {
    const ProbeResult result = TryGroup(group, rank.gpus, false);
    RANK_CHECK(result.state == ProbeState::kPassed, result.text());
    for (size_t i = 0; i < kProbeSteps.size(); ++i) {
      const bool done = kProbeSteps[i].kind >= ProbeStep::Kind::kAllReduce && !kProbeSteps[i].timing_only;
      RANK_CHECK_EQ(result.micros[i], done ? 3.f : 0.f);
    }
  });
}

TEST_CASE("a process that has used NCCL with P2P cannot give P2P up") {
  Scenario scenario(2);
  FakeHelpers::Tell("hung", "pass");
  scenario.change = [](AutoGroupOptions& options, int rank) { options.nccl_started = rank == 1; };
  const BackendChoice choice = scenario.Start();
  CHECK(choice.backend == "hierarchical");
  CHECK(absl::StrContains(choice.text, "has used NCCL with P2P before"));
}

TEST_CASE("ranks that NCCL does not take together need no check") {
  Scenario shared(2);
  shared.job.gpus.identity = [](int) { return "fake:0"; };
  const BackendChoice choice = shared.Start();
  CHECK(choice.backend == "hierarchical");
  CHECK(absl::StrContains(choice.failure, "ranks 0 and 1 use the same GPU"));
  CHECK(shared.helpers.Count() == 0);

  const auto older = [](AutoGroupOptions& options, int rank) {
    if (rank == 0) return;
    options.api->GetVersion = [](int* version) {
      *version = 21805;
      return nccl::kSuccess;
    };
  };
  Scenario mixed(2);
  mixed.change = older;
  CHECK(absl::StrContains(mixed.Start().failure, "rank 0 has NCCL 2.28.9 and rank 1 has 2.18.5"));
  CHECK(mixed.helpers.Count() == 0);
}

TEST_CASE("a GPU that is not there is an error with any backend") {
  Scenario scenario(2);
  scenario.change = [](AutoGroupOptions& options, int rank) {
    if (rank == 1) options.device.index = 7;
  };
  for (const absl::StatusOr<BackendChoice>& one : scenario.StartAll()) {
    CheckStatus(__FILE__, __LINE__, "CreateAutoGroup", one.status(), absl::StatusCode::kFailedPrecondition,
                {"rank 1", "GPU 7 is asked for"});
  }
  CHECK(scenario.helpers.Count() == 0);
}

TEST_CASE("a choice is remembered with its comparison, if all ranks remember the same") {
  Scenario scenario(2);
  scenario.cache = scenario.folder.path();
  FakeHelpers::Tell("1=hung,pass", "pass");
  const auto looks_again = [&](const char* backend) {
    unsetenv("NCCL_P2P_DISABLE");
    const int before = scenario.helpers.Count();
    const BackendChoice choice = scenario.Start();
    INFO(choice.text);
    CHECK(choice.backend == backend);
    CHECK(choice.failed_rank == 1);
    CHECK(choice.from_cache == (scenario.helpers.Count() == before));
    return !choice.from_cache;
  };
  CHECK(looks_again("nccl"));
  scenario.OperationsTake(9);  // nobody measures again
  CHECK_FALSE(looks_again("nccl"));
  scenario.fresh = true;
  CHECK(looks_again("hierarchical"));
  scenario.fresh = false;
  CHECK_FALSE(looks_again("hierarchical"));
  // What was faster is tried out again. Where it fails, the next one counts, and the next start compares again.
  scenario.job.gpus.staged_blocks = [](int) { return 1; };
  CHECK_FALSE(looks_again("nccl"));
  scenario.job.gpus.staged_blocks = [](int) { return 16; };
  CHECK(looks_again("hierarchical"));

  // The ranks remember different comparisons: as if one rank remembered nothing.
  const auto file_of = [&](int rank) {
    for (const auto& entry : fs::recursive_directory_iterator(absl::StrCat(scenario.cache, "/", rank))) {
      if (entry.is_regular_file()) return entry.path().string();
    }
    return std::string();
  };
  std::ifstream in(file_of(1));
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t at = text.find("micros_hierarchical");
  REQUIRE(at != std::string::npos);
  text.replace(text.find("9,", at), 2, "7,");
  std::ofstream(file_of(1)) << text;
  CHECK(looks_again("hierarchical"));

  scenario.job.gpus.staged_blocks = [](int) { return 1; };  // so that there is nothing to compare with, which is faster
  fs::remove(file_of(0));
  CHECK(looks_again("nccl"));
  std::ofstream(file_of(0)) << "nonsense";
  CHECK(looks_again("nccl"));
  fs::permissions(file_of(1), fs::perms::others_write, fs::perm_options::add);
  CHECK(looks_again("nccl"));
  CHECK_FALSE(looks_again("nccl"));
}

}  // namespace
}  // namespace ddp::testing::simulated
