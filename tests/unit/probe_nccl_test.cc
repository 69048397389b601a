// SPDX-License-Identifier: Apache-2.0
// All ranks' verdict on NCCL: by helpers that do as they are told, and in the process on simulated GPUs.
#include "libddp/comm/probe/probe_nccl.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "libddp/base/env.h"
#include "tests/support/fake_probe.h"
#include "tests/support/nccl_job.h"
#include "tests/support/temporary_folder.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;
namespace fs = std::filesystem;

class Scenario : public ProbeScenario<ProbeNcclOptions> {
 public:
  explicit Scenario(int size) : ProbeScenario(size) { OperationsTake(9); }

  static void Tell(const char* configured, const char* without_p2p) { FakeHelpers::Tell(configured, without_p2p); }
  // The report, which has to be the same on all ranks.
  ProbeReport Probe() {
    std::vector<ProbeReport> reports(static_cast<size_t>(job.size));
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      ProbeNcclOptions options;
      options.device = rank.device();
      SetProbe(options, rank.rank);
      options.runtime = &rank.gpus;
      options.api = rank.nccl.api();
      options.complete = [](ProbeReport&) { return absl::OkStatus(); };
      Change(options, rank.rank);
      reports[static_cast<size_t>(rank.rank)] = RANK_VALUE(ProbeNccl(*control, options));
      RANK_CHECK_OK(control->Barrier().Wait());
    });
    for (const ProbeReport& report : reports) CHECK(Describe(report) == Describe(reports[0]));
    return reports[0];
  }
  int Helpers() const { return helpers.Count(); }
};

struct Probed {
  std::unique_ptr<Scenario> scenario;
  ProbeReport report;
};

// What ranks find by so many helpers, which are told `configured` and `without_p2p`. A helper notes that it has
// started; where a busy machine kept one from that until another one's failure had ended it, the ranks look again.
Probed ProbeBy(int helpers, int size, const char* configured, const char* without_p2p,
               absl::Duration limit = absl::Seconds(20)) {
  Probed probed;
  for (int tries = 0; tries < 5 && (tries == 0 || probed.scenario->Helpers() < helpers); ++tries) {
    probed.scenario.reset();  // what it has set counts no more when the next one begins
    probed.scenario = std::make_unique<Scenario>(size);
    probed.scenario->limit = limit;
    Scenario::Tell(configured, without_p2p);
    probed.report = probed.scenario->Probe();
  }
  return probed;
}

TEST_CASE("helpers that pass, fail, hang, crash: all ranks agree on what follows") {
  struct Case {
    const char *configured, *without_p2p;
    ProbeVerdict verdict;
    int rank;
    const char* words;
  };
  const Case cases[] = {
      {"pass", "error", ProbeVerdict::kWorks, -1, "NCCL works"},
      {"slow", "error", ProbeVerdict::kWorks, -1, "took 100.0 ms"},
      {"hung", "pass", ProbeVerdict::kWorksWithoutP2p, 0, "all-reduce of 512 KiB hung"},
      {"1=error,hang", "pass", ProbeVerdict::kWorksWithoutP2p, 1, "unhandled cuda error"},
      {"1=wrong,pass", "pass", ProbeVerdict::kWorksWithoutP2p, 1, "wrong data"},
      {"1=crash,hang", "pass", ProbeVerdict::kWorksWithoutP2p, 1, "signal 11"},
      {"error", "error", ProbeVerdict::kInconclusive, 0, "has not been shown"},
      {"1=error,pass", "0=hung,pass", ProbeVerdict::kInconclusive, 1, "512 KiB on"},
      {"1=crash,hang", "1=crash,hang", ProbeVerdict::kInconclusive, 1, "crashed (signal 11"},
  };
  for (const int size : {2, 4}) {
    for (const Case& c : cases) {
      CAPTURE(size, c.configured, c.without_p2p);
      const int helpers = size * (c.verdict == ProbeVerdict::kWorks ? 1 : 2);
      const auto [scenario, report] = ProbeBy(helpers, size, c.configured, c.without_p2p);
      INFO(Describe(report));
      CHECK(report.verdict == c.verdict);
      CHECK(report.failed_rank == c.rank);
      CHECK(absl::StrContains(Describe(report), c.words));
      CHECK(report.note.empty());
      CHECK(scenario->Helpers() == helpers);
      CHECK(scenario->job.nccl.Calls("CommInitRankConfig") == 0);  // nothing was done in this process
    }
  }
}

struct Found {
  ProbeReport report;
  int helpers, beside_the_first;
};

// What ranks find in `limit` with helpers that are told `configured` and `without_p2p`; or in more, until it is
// `verdict`, by so many helpers.
Found ProbeWithin(absl::Duration limit, int size, const char* configured, const char* without_p2p, ProbeVerdict verdict,
                  int helpers, int beside_the_first) {
  const auto probe = [&](absl::Duration time) {
    Scenario scenario(size);
    scenario.limit = time;
    Scenario::Tell(configured, without_p2p);
    ProbeReport report = scenario.Probe();
    return Found{std::move(report), scenario.Helpers(), scenario.helpers.CountBesideTheFirst()};
  };
  const Found found = GivenTime(limit, probe, [&](const Found& one) {
    return one.report.verdict == verdict && one.helpers == helpers && one.beside_the_first == beside_the_first;
  });
  CAPTURE(size, configured, without_p2p, Describe(found.report));
  CHECK(found.report.verdict == verdict);
  CHECK(found.helpers == helpers);
  CHECK(found.beside_the_first == beside_the_first);
  return found;
}

TEST_CASE("helpers that hang without a word end with the limit") {
  const ProbeReport report =
      ProbeWithin(absl::Milliseconds(200), 2, "hang", "pass", ProbeVerdict::kWorksWithoutP2p, 4, 2).report;
  CHECK(report.failed_step == "all-reduce of 4 B");
  CHECK(report.how == "hung");
}

TEST_CASE("while a collective seems to hang the helper without P2P starts, and is used if its GPU takes both") {
  for (const int size : {2, 4}) {
    ProbeWithin(absl::Milliseconds(500), size, "hang", "pass", ProbeVerdict::kWorksWithoutP2p, 2 * size, size);
  }
  ProbeWithin(absl::Milliseconds(500), 2, "hang", "1=alone,pass", ProbeVerdict::kWorksWithoutP2p, 5, 2);
  // What was only slow passes, and the second helpers end unused.
  ProbeWithin(absl::Seconds(4), 2, "late", "error", ProbeVerdict::kWorks, 4, 2);
}

TEST_CASE("where P2P is off already there is nothing to compare with") {
  setenv("NCCL_P2P_DISABLE", "1", 1);
  for (const char* what : {"error", "hang"}) {
    const auto [scenario, report] = ProbeBy(2, 2, "", what, absl::Milliseconds(500));
    CHECK(report.verdict == ProbeVerdict::kBroken);
    CHECK(scenario->Helpers() == 2);
  }
  unsetenv("NCCL_P2P_DISABLE");
}

TEST_CASE("helpers that are missing, killed or lie say nothing about NCCL: it is tried in the process") {
  for (const int size : {2, 4}) {
    for (const char* what : {"1=killed,hang", "1=lie,pass", "0=garbage,pass", "1=exit,pass", "0=device,pass"}) {
      CAPTURE(size, what);
      const auto [scenario, report] = ProbeBy(size, size, what, "pass");
      INFO(Describe(report));
      CHECK(report.verdict == ProbeVerdict::kWorks);
      CHECK(absl::StrContains(report.note, "without ddp_probe"));
      CHECK(scenario->Helpers() == size);
      CHECK(scenario->job.nccl.Calls("CommInitRankConfig") == size);
      CHECK(scenario->job.nccl.live_comms() == 0);
    }
    Scenario scenario(size);
    scenario.rank_without_helper = 1;
    const ProbeReport report = scenario.Probe();
    CHECK(report.verdict == ProbeVerdict::kWorks);
    CHECK(absl::StrContains(report.note, "rank 1 has none"));
    CHECK(absl::StrContains(report.note, "/no/such/program"));
    CHECK(scenario.Helpers() == 0);
  }
}

TEST_CASE("in the process, too, what fails or hangs ends in time, and all agree") {
  struct Case {
    const char* function;
    Mishap mishap;
    const char* words;
    double seconds;
  };
  const Case cases[] = {
      {"CommInitRankConfig", Mishap::kFail, "connecting the ranks failed", 20},
      {"CommInitRankConfig", Mishap::kHang, "connecting the ranks hung", 0.5},
      {"AllReduce", Mishap::kStuck, "all-reduce of 4 B hung", 2},
      {"AllReduce", Mishap::kCorrupt, "wrong data", 20},
      {"AllGather", Mishap::kFail, "all-gather of 4 B failed", 20},
  };
  for (const int size : {2, 4}) {
    for (const Case& c : cases) {
      CAPTURE(size, c.function, static_cast<int>(c.mishap));
      const auto probe = [&](absl::Duration limit) {
        Scenario scenario(size);
        scenario.helper = "/no/such/program";
        scenario.limit = limit;
        scenario.job.nccl.Plan(c.function, 1, c.mishap);
        return scenario.Probe();
      };
      const ProbeReport report = GivenTime(TimeFor(absl::Seconds(c.seconds)), probe, [&](const ProbeReport& one) {
        return absl::StrContains(Describe(one), c.words);
      });
      INFO(Describe(report));
      CHECK(report.verdict == ProbeVerdict::kInconclusive);
      CHECK(absl::StrContains(Describe(report), c.words));
    }
  }
}

TEST_CASE("a library that one rank lacks is no matter of P2P, and no helper is started") {
  Scenario scenario(2);
  scenario.change = [](ProbeNcclOptions& options, int rank) {
    if (rank == 1) {
      options.api->GetVersion = [](int* version) {
        *version = 21703;
        return nccl::kSuccess;
      };
    }
  };
  const ProbeReport report = scenario.Probe();
  CHECK(report.verdict == ProbeVerdict::kBroken);
  CHECK(report.failed_rank == 1);
  CHECK(absl::StrContains(report.how, "too old"));
  CHECK(scenario.Helpers() == 0);
}

TEST_CASE("a peer that has gone ends the probe with the group's error") {
  Scenario scenario(2);
  Scenario::Tell("hang", "hang");
  scenario.job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    ProbeNcclOptions options;
    options.device = rank.device();
    options.helper = scenario.helper;
    options.runtime = &rank.gpus;
    options.api = rank.nccl.api();
    options.cache = "";
    if (rank.rank == 1) {
      control->Abort(absl::UnavailableError("this rank goes"));
      return;
    }
    RANK_CHECK_STATUS(ProbeNccl(*control, options).status(), absl::StatusCode::kAborted, "this rank goes");
  });
}

// --- what is remembered ---------------------------------------------------------------------------------------------

std::vector<std::string> FilesIn(const std::string& folder) {
  std::vector<std::string> files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path().string());
  }
  return files;
}

TEST_CASE("a verdict is remembered, for as long as nothing changes and by all ranks") {
  Scenario scenario(2);
  scenario.cache = scenario.folder.path() + "/a/b";
  Scenario::Tell("1=hung,pass", "pass");
  const ProbeReport first = scenario.Probe();
  CHECK(first.verdict == ProbeVerdict::kWorksWithoutP2p);
  CHECK_FALSE(first.from_cache);
  CHECK(scenario.Helpers() == 4);
  const std::vector<std::string> files = FilesIn(scenario.cache);
  REQUIRE(files.size() == 2);
  for (const std::string& file : files) {
    struct stat about;
    REQUIRE(stat(file.c_str(), &about) == 0);
    CHECK((about.st_mode & 0777) == 0600);
  }

  const ProbeReport second = scenario.Probe();
  CHECK(second.from_cache);
  CHECK(scenario.Helpers() == 4);
  CHECK(second.verdict == first.verdict);
  CHECK(second.cause == first.cause);
  CHECK(second.remedy == first.remedy);
  CHECK(second.how == first.how);
  CHECK(second.micros == first.micros);
  CHECK(second.micros_without_p2p == first.micros_without_p2p);

  const auto looks_again = [&] {
    const int before = scenario.Helpers();
    const bool from_cache = scenario.Probe().from_cache;
    CHECK(from_cache == (scenario.Helpers() == before));
    return !from_cache;
  };
  CHECK_FALSE(looks_again());
  scenario.fresh = true;
  CHECK(looks_again());
  scenario.fresh = false;
  CHECK_FALSE(looks_again());
  setenv("NCCL_ALGO", "ring", 1);
  CHECK(looks_again());
  unsetenv("NCCL_ALGO");
  setenv("NCCL_DEBUG", "WARN", 1);  // changes nothing
  CHECK_FALSE(looks_again());
  unsetenv("NCCL_DEBUG");
  fs::remove(files[1]);  // one rank's
  CHECK(looks_again());
  CHECK_FALSE(looks_again());
  fs::permissions(files[0], fs::perms::others_write, fs::perm_options::add);
  CHECK(looks_again());
  std::ofstream(files[0], std::ios::app) << "verdict 0\n";  // the first counts
  CHECK_FALSE(looks_again());
  std::ofstream(files[0]) << "nonsense";
  CHECK(looks_again());
  fs::remove(files[0]);
  fs::create_symlink(files[1], files[0]);
  CHECK(looks_again());
  scenario.job.gpus.identity = [](int device) { return absl::StrCat("other:", device); };
  CHECK(looks_again());
}

TEST_CASE("what does not work is looked at again at each start") {
  Scenario scenario(2);
  scenario.cache = scenario.folder.path() + "/cache";
  Scenario::Tell("error", "error");
  CHECK(scenario.Probe().verdict == ProbeVerdict::kInconclusive);
  CHECK_FALSE(fs::exists(scenario.cache));
  CHECK_FALSE(scenario.Probe().from_cache);
}

TEST_CASE("who only looks leaves nothing behind, and NCCL without P2P is remembered with its comparison only") {
  Scenario scenario(2);
  scenario.cache = scenario.folder.path() + "/cache";
  Scenario::Tell("hung", "pass");
  scenario.change = [](ProbeNcclOptions& options, int) { options.complete = nullptr; };
  CHECK(scenario.Probe().verdict == ProbeVerdict::kWorksWithoutP2p);
  CHECK_FALSE(fs::exists(scenario.cache));
  scenario.change = [](ProbeNcclOptions& options, int) {
    options.fresh = true;
    options.remember = false;
  };
  for (const char* configured : {"hung", "pass"}) {
    Scenario::Tell(configured, "pass");
    CHECK(scenario.Probe().key.empty());
    CHECK_FALSE(fs::exists(scenario.cache));
  }
  // Nor is it misled by what is there, or takes it away.
  scenario.change = nullptr;
  CHECK(scenario.Probe().verdict == ProbeVerdict::kWorks);
  scenario.change = [](ProbeNcclOptions& options, int) {
    options.fresh = true;
    options.remember = false;
  };
  Scenario::Tell("hung", "pass");
  CHECK(scenario.Probe().verdict == ProbeVerdict::kWorksWithoutP2p);
  scenario.change = nullptr;
  const ProbeReport later = scenario.Probe();
  CHECK(later.from_cache);
  CHECK(later.verdict == ProbeVerdict::kWorks);
}

TEST_CASE("a cache that cannot be written costs nothing but time") {
  Scenario scenario(2);
  scenario.cache = scenario.folder.path() + "/file";
  std::ofstream(scenario.cache) << "x";
  CHECK(scenario.Probe().verdict == ProbeVerdict::kWorks);
  CHECK_FALSE(scenario.Probe().from_cache);
}

TEST_CASE("the key has what a verdict depends on") {
  TemporaryFolder folder;
  FakeDevices& gpus = KeptDevices(2);
  gpus.identity = [](int device) { return absl::StrCat("0000:5D:0", device, ".0"); };
  const auto key = [&](int version = 22809, const std::vector<std::string>& variables = {"NCCL_ALGO=ring"}) {
    return ProbeKey(gpus, {Device::Kind::kCuda, 0}, version, variables, folder.path());
  };
  const std::string plain = key();
  CHECK(absl::StrContains(plain, "0000:5D:00.0"));
  folder.Write("proc/driver/nvidia/version", "NVRM version: 570.86\nGCC\n");
  const std::string with_driver = key();
  CHECK(with_driver != plain);
  folder.Write("proc/driver/nvidia/gpus/0000:5d:00.0/information", "Model: \t X\nGPU UUID: \t GPU-1234\n");
  const std::string with_uuid = key();
  CHECK(absl::StrContains(with_uuid, "GPU-1234"));
  folder.Write("proc/sys/kernel/random/boot_id", "one\n");
  const std::string one = key();
  CHECK(one != with_uuid);
  folder.Write("proc/sys/kernel/random/boot_id", "two\n");
  CHECK(key() != one);
  CHECK(key(22902) != key());
  CHECK(key(22809, {"NCCL_ALGO=tree"}) != key());
  CHECK(key(22809, {"HOME=/x", "NCCL_ALGO=ring", "NCCL_DEBUG_FILE=/y"}) == key());
  CHECK(key(22809, {"NCCL_ALGO=ring", "DDP_NCCL_LIBRARY=/x"}) != key());
  const std::vector<std::string> at_home = {"HOME=/home/u", "NCCL_ALGO=ring"};
  const std::string without_file = key();
  CHECK(key(22809, at_home) == without_file);
  folder.Write("home/u/.nccl.conf", "NCCL_P2P_DISABLE=1\n");
  CHECK(key(22809, at_home) != without_file);
  CHECK(key() == without_file);
  folder.Write("etc/nccl.conf", "NCCL_P2P_DISABLE=1\n");
  CHECK(key() != without_file);
  const std::vector<std::string> named = {"NCCL_CONF_FILE=" + folder.path() + "/mine", "NCCL_ALGO=ring"};
  const std::string empty = key(22809, named);
  std::filesystem::create_directory(folder.path() + "/mine");  // has no text
  CHECK(key(22809, named) == empty);
  std::filesystem::remove(folder.path() + "/mine");
  folder.Write("mine", "NCCL_ALGO=tree\n");
  CHECK(key(22809, named) != empty);
}

TEST_CASE("the cache lies where the variables say") {
  const std::optional<std::string> home = ReadEnv(Env::kHome), xdg = ReadEnv(Env::kXdgCacheHome);
  unsetenv("XDG_CACHE_HOME");
  setenv("HOME", "/home/u", 1);
  CHECK(ProbeCacheFolder() == "/home/u/.cache/ddp");
  setenv("XDG_CACHE_HOME", "/x", 1);
  CHECK(ProbeCacheFolder() == "/x/ddp");
  setenv("DDP_PROBE_CACHE", "/y", 1);
  CHECK(ProbeCacheFolder() == "/y");
  setenv("DDP_PROBE_CACHE", "off", 1);
  CHECK(ProbeCacheFolder().empty());
  unsetenv("DDP_PROBE_CACHE");
  unsetenv("XDG_CACHE_HOME");
  unsetenv("HOME");
  CHECK(ProbeCacheFolder().empty());
  if (home.has_value()) setenv("HOME", home->c_str(), 1);
  if (xdg.has_value()) setenv("XDG_CACHE_HOME", xdg->c_str(), 1);
}

}  // namespace
}  // namespace ddp::testing::simulated
