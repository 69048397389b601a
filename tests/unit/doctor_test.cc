// SPDX-License-Identifier: Apache-2.0
// What the doctor makes of facts: each thing that can be wrong is planted once.
#include <functional>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/support/catch.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/report.h"
#include "tools/doctor/watch.h"

namespace doctor {
namespace {

// Four ranks on four GPUs, and nothing wrong.
Facts Healthy() {
  Facts facts;
  facts.system = "Linux 6.1";
  facts.nvidia_devices = 4;
  facts.driver = "570.86.15";
  facts.driver_cuda = 13000;
  facts.built_cuda = "12.8.61";
  for (int i = 0; i < 4; ++i) {
    Gpu gpu;
    gpu.bus_id = absl::StrCat("0000:0", i, ":00.0");
    gpu.name = "NVIDIA GeForce RTX 5090";
    gpu.compute_major = 12;
    gpu.link = {.width = 16, .max_width = 16, .speed = 32, .max_speed = 32};
    gpu.numa_node = 0;
    gpu.near_processors = {0, 1, 2, 3};
    facts.gpus.push_back(gpu);
  }
  facts.nccl_built = true;
  facts.nccl_version = 22809;
  facts.cudnn = true;
  facts.shared_memory_mib = facts.free_shared_memory_mib = 4096;
  facts.mpi_built = true;
  facts.launcher = "mpirun";
  facts.ranks = facts.local_ranks = 4;
  facts.processors = {0, 1};
  facts.online_processors = 8;
  return facts;
}

TEST_CASE("a healthy machine gets no remedy") {
  for (const Finding& finding : Check(Healthy())) {
    INFO(finding.text);
    CHECK(finding.severity == Severity::kOk);
    CHECK(finding.remedy.empty());
  }
  CHECK(Check(Healthy()).size() == 6);  // system, four GPUs, NCCL
}

struct Planted {
  const char* check;
  Severity severity;
  const char *text, *remedy;
  std::function<void(Facts&)> plant;
};

const Planted kPlanted[] = {
    {"wsl", Severity::kNote, "WSL2", "", [](Facts& f) { f.wsl = true; }},
    {"driver", Severity::kError, "4 NVIDIA GPUs on the PCI bus, but no driver", "modprobe nvidia",
     [](Facts& f) {
       f.driver.clear();
       f.driver_cuda = 0;
       f.gpus.clear();
     }},
    {"visible", Severity::kError, "sees no GPU", "CUDA_VISIBLE_DEVICES", [](Facts& f) { f.gpus.clear(); }},
    {"cuda_start", Severity::kError, "does not start (cuInit: error 803, x)", "reboot",
     [](Facts& f) {
       f.gpus.clear();
       f.cuda_error = "cuInit: error 803, x";
     }},
    {"gpus", Severity::kNote, "no GPU", "",
     [](Facts& f) {
       f.gpus.clear();
       f.nvidia_devices = 0;
     }},
    {"cuda_build", Severity::kError, "without CUDA", "-DDDP_WITH_CUDA=ON", [](Facts& f) { f.built_cuda.clear(); }},
    {"driver_cuda", Severity::kError, "runs CUDA 12.8 at most", "update the driver",
     [](Facts& f) {
       f.driver_cuda = 12080;
       f.built_cuda = "13.0";
     }},
    {"blackwell_cuda", Severity::kError, "needs a driver that runs CUDA 12.8; this one runs 12.4", "update the driver",
     [](Facts& f) { f.driver_cuda = 12040; }},
    {"blackwell_nccl", Severity::kError, "needs NCCL 2.26.2; this one is 2.25.1", "libnccl2",
     [](Facts& f) { f.nccl_version = 22501; }},
    {"nccl_build", Severity::kWarning, "without NCCL", "-DDDP_WITH_NCCL=ON", [](Facts& f) { f.nccl_built = false; }},
    {"nccl", Severity::kError, "cannot be loaded", "DDP_NCCL_LIBRARY",
     [](Facts& f) { f.nccl_error = "NCCL cannot be loaded (libnccl.so.2)"; }},
    {"cudnn", Severity::kNote, "cuDNN", "apt-get", [](Facts& f) { f.cudnn = false; }},
    {"pcie_width", Severity::kWarning, "0000:02:00.0 has 4 of 16", "slot", [](Facts& f) { f.gpus[2].link.width = 4; }},
    {"pcie_speed", Severity::kNote, "at 2.5 of 32 GT/s", "under load", [](Facts& f) { f.gpus[1].link.speed = 2.5; }},
    {"clocks", Severity::kWarning, "temperature, power limit", "nvidia-smi -q -d PERFORMANCE",
     [](Facts& f) {
       f.gpus[0].slowed_by = {"temperature", "power limit"};
     }},
    {"p2p_driver", Severity::kNote, "between GPUs 0-1, 2-3", "",
     [](Facts& f) {
       f.without_p2p = {{0, 1}, {2, 3}};
     }},
    {"acs", Severity::kWarning, "ACS is on", "for b in 0000:00:01.0 0000:00:02.0; do setpci",
     [](Facts& f) {
       f.gpus[0].redirecting = {"0000:00:02.0"};
       f.gpus[1].redirecting = {"0000:00:01.0", "0000:00:02.0"};
     }},
    {"acs", Severity::kNote, "cannot be read", "as root", [](Facts& f) { f.acs_readable = false; }},
    {"iommu", Severity::kWarning, "IOMMU is on", "iommu=pt", [](Facts& f) { f.iommu = true; }},
    {"shm", Severity::kWarning, "64 MiB", "--shm-size=1g", [](Facts& f) { f.shared_memory_mib = 64; }},
    {"shm", Severity::kWarning, "20 MiB are free, of 4096", "ls -l /dev/shm",
     [](Facts& f) { f.free_shared_memory_mib = 20; }},
    {"shm", Severity::kWarning, "no /dev/shm", "mount -t tmpfs", [](Facts& f) { f.shared_memory_mib = -1; }},
    {"memlock", Severity::kNote, "8192 KiB", "ulimit -l unlimited", [](Facts& f) { f.locked_memory_kib = 8192; }},
    {"ptrace", Severity::kNote, "ptrace_scope is 1", "sysctl", [](Facts& f) { f.ptrace_scope = 1; }},
    {"nccl_variable", Severity::kWarning, "NCCL_NTHREADS=4: it may be 64", "unset NCCL_NTHREADS",
     [](Facts& f) { f.doubtful_variables = {"NCCL_NTHREADS=4: it may be 64, 128, 256 or 512"}; }},
    {"variable", Severity::kError, "DDP_SHARED_MEMORY is 'x'", "docs/environment.md",
     [](Facts& f) { f.wrong_variable = "DDP_SHARED_MEMORY is 'x'"; }},
    {"mpi", Severity::kNote, "without MPI", "openmpi", [](Facts& f) { f.mpi_built = false; }},
    {"store_port", Severity::kError, "port 29500", "DDP_STORE_PORT",
     [](Facts& f) {
       f.store_port = 29500;
       f.store_port_taken = true;
     }},
    {"oversubscribed", Severity::kWarning, "4 ranks share 2 processors", "mpirun -n 2",
     [](Facts& f) { f.online_processors = 2; }},
    {"oversubscribed", Severity::kWarning, "4 ranks may use 2 of this host's 8 processors", "without taskset",
     [](Facts& f) { f.shared_processors = 2; }},
    {"backend", Severity::kError, "this rank sees no GPU", "unset DDP_BACKEND",
     [](Facts& f) {
       f.backend = "nccl";
       f.gpus.clear();
       f.nvidia_devices = 0;
       f.driver.clear();
     }},
    {"backend", Severity::kError, "for one rank, not for 4", "unset DDP_BACKEND",
     [](Facts& f) { f.backend = "local"; }},
    {"binding", Severity::kNote, "one processor only, of 8", "--bind-to numa", [](Facts& f) { f.processors = {1}; }},
    {"numa", Severity::kWarning, "rank 3 runs on processors far from its GPU 0000:03:00.0", "numactl --cpunodebind=0",
     [](Facts& f) {
       f.rank = f.local_rank = 3;
       f.processors = {6, 7};
     }},
};

TEST_CASE("each thing that can be wrong is found, with its cause and a remedy") {
  for (const Planted& planted : kPlanted) {
    Facts facts = Healthy();
    planted.plant(facts);
    CAPTURE(planted.check);
    int found = 0;
    for (const Finding& finding : Check(facts)) {
      if (finding.severity == Severity::kOk) continue;
      if (finding.check != planted.check) continue;
      INFO(finding.text << " -> " << finding.remedy);
      found += finding.severity == planted.severity && absl::StrContains(finding.text, planted.text) &&
                       absl::StrContains(finding.remedy, planted.remedy)
                   ? 1
                   : 0;
      if (finding.severity >= Severity::kWarning) CHECK_FALSE(finding.remedy.empty());
    }
    CHECK(found >= 1);
  }
}

TEST_CASE("what is of no matter on this machine is not said") {
  Facts alone = Healthy();
  alone.gpus.resize(1);
  alone.local_ranks = alone.ranks = 1;
  alone.shared_memory_mib = 64;
  alone.locked_memory_kib = 64;
  alone.ptrace_scope = 2;
  alone.iommu = true;
  alone.processors = {1};
  for (const Finding& finding : Check(alone)) CHECK(finding.severity == Severity::kOk);

  Facts off = Healthy();
  off.ptrace_scope = 1;
  off.single_copy_off = true;
  for (const Finding& finding : Check(off)) CHECK(finding.severity == Severity::kOk);
}

TEST_CASE("the probe's verdict is a finding") {
  ddp::ProbeReport report;
  report.verdict = ddp::ProbeVerdict::kWorks;
  CHECK(CheckProbe(report).severity == Severity::kOk);
  CHECK(CheckProbe(report).text == "NCCL works");
  report.warning = "took 50 ms: look at PCIe";
  CHECK(CheckProbe(report).severity == Severity::kWarning);
  CHECK(absl::StrContains(CheckProbe(report).remedy, "look at PCIe"));
  report.warning.clear();
  report.verdict = ddp::ProbeVerdict::kWorksWithoutP2p;
  CHECK(CheckProbe(report).severity == Severity::kWarning);
  CHECK(CheckProbe(report).remedy == "export NCCL_P2P_DISABLE=1");
  report.remedy = "update it";
  for (const ddp::ProbeVerdict bad : {ddp::ProbeVerdict::kInconclusive, ddp::ProbeVerdict::kBroken}) {
    report.verdict = bad;
    CHECK(CheckProbe(report).severity == Severity::kError);
    CHECK(CheckProbe(report).remedy == "update it");
    CHECK_FALSE(absl::StrContains(CheckProbe(report).text, "update it"));  // said once
  }
}

TEST_CASE("what auto would choose is said, with regard to DDP_BACKEND and to what is remembered") {
  AutoFacts facts;
  facts.choice = "nccl";
  facts.why = "nccl: NCCL works";
  Findings findings = CheckChoice(facts);
  REQUIRE(findings.size() == 1);
  CHECK(findings[0].severity == Severity::kOk);
  CHECK(absl::StartsWith(findings[0].text, "auto chooses nccl: NCCL works; nothing is remembered"));

  facts.remembered.emplace().verdict = ddp::ProbeVerdict::kWorks;
  CHECK(absl::EndsWith(CheckChoice(facts)[0].text, "an earlier start has found, too: the next one checks nothing"));
  facts.remembered->verdict = ddp::ProbeVerdict::kWorksWithoutP2p;
  findings = CheckChoice(facts);
  REQUIRE(findings.size() == 2);
  CHECK(findings[1].severity == Severity::kWarning);
  CHECK(
      absl::StrContains(findings[1].text, "has found otherwise, and the next one believes it: NCCL works without P2P"));
  CHECK(absl::StrContains(findings[1].remedy, "DDP_FRESH_PROBE=1"));

  facts.fresh = true;
  CHECK(CheckChoice(facts)[1].text == "DDP_FRESH_PROBE=1 makes each start check NCCL again, which takes seconds");
  facts.fresh = facts.remembers = false;
  CHECK(CheckChoice(facts)[1].remedy == "unset DDP_PROBE_CACHE");

  facts.backend = "hierarchical";
  findings = CheckChoice(facts);
  REQUIRE(findings.size() == 1);
  CHECK(findings[0].severity == Severity::kNote);
  CHECK(findings[0].remedy == "unset DDP_BACKEND");
  CHECK(absl::StrContains(findings[0].text, "use hierarchical without a check; auto would choose nccl"));

  facts.backend = "nccl";
  facts.choice = "hierarchical";
  facts.why = "hierarchical: NCCL does not work: hung";
  findings = CheckChoice(facts);
  CHECK(findings[0].severity == Severity::kError);
  CHECK(absl::StrContains(findings[0].text, "what does not work here; auto would choose hierarchical: NCCL does not"));

  facts.choice.clear();
  facts.why = "no backend works on these GPUs. nccl: x. hierarchical: y";
  CHECK(CheckChoice(facts)[0].severity == Severity::kError);
  CHECK(CheckChoice(facts)[0].text == facts.why);
}

TEST_CASE("what was cut off is named, with what gives it more time") {
  const Finding finding = CutOff("the start of the GPUs' driver", absl::Seconds(20));
  CHECK(finding.severity == Severity::kError);
  CHECK(absl::StrContains(finding.text, "(20s) when ddp_doctor was at the start of the GPUs' driver"));
  CHECK(absl::StrContains(finding.remedy, "ddp_doctor --limit 60"));
  CHECK(MoreTime(absl::Seconds(50)) == "ddp_doctor --limit 150");
}

TEST_CASE("the watch says what has been found when the time is over, and is silent before") {
  std::promise<Findings> late;
  const auto say = [&](const Findings& findings) { late.set_value(findings); };
  {
    Watch watch(absl::Now() + absl::Milliseconds(20), absl::Seconds(20), say);
    watch.Found({{Severity::kOk, "system", "Linux", ""}});
    watch.Begin("a nap");
    const Findings findings = late.get_future().get();
    REQUIRE(findings.size() == 2);
    CHECK(findings[0].check == "system");
    CHECK(findings[1].check == "cut_off");
    CHECK(absl::StrContains(findings[1].text, "at a nap:"));
  }
  const Watch in_time(absl::Now() + absl::Hours(1), absl::Seconds(20), say);  // a second value would throw
}

TEST_CASE("what several ranks say stands once, the worst first") {
  const Finding port = {Severity::kError, "store_port", "port 1", "set another"};
  const Finding shm = {Severity::kWarning, "shm", "64 MiB", "more"};
  const Finding ok = {Severity::kOk, "system", "Linux", ""};
  const Findings merged = Merge({{ok, shm}, {ok, shm}, {ok, port}});
  REQUIRE(merged.size() == 3);
  CHECK(merged[0].check == "store_port");
  CHECK(merged[0].ranks == std::vector<int>{2});
  CHECK(merged[1].ranks == std::vector<int>{0, 1});
  CHECK(merged[2].ranks == std::vector<int>{0, 1, 2});
  CHECK(ExitCode(merged) == 1);
  CHECK(ExitCode({shm, ok}) == 0);

  const std::string text = ToText(merged, 3);
  CHECK(absl::StrContains(text, "error: port 1 (rank 2)\n    remedy: set another\n"));
  CHECK(absl::StrContains(text, "warning: 64 MiB (ranks 0, 1)\n"));
  CHECK(absl::StrContains(text, "ok: Linux\n"));
  CHECK(absl::StrContains(text, "1 error, 1 warning\n"));

  const nlohmann::json json = nlohmann::json::parse(ToJson(merged, 3, R"({"cpu": 1})"));
  CHECK(json["ranks"] == 3);
  CHECK(json["errors"] == 1);
  CHECK(json["findings"][0]["severity"] == "error");
  CHECK(json["findings"][0]["ranks"] == std::vector<int>{2});
  CHECK(json["environment"]["cpu"] == 1);
}

TEST_CASE("ranks without a GPU beside others are named, since nothing is tried out then") {
  CHECK(CheckGpusOfRanks({true, true}).empty());
  CHECK(CheckGpusOfRanks({false, false}).empty());  // each rank says so itself
  const Findings findings = CheckGpusOfRanks({true, false, true});
  REQUIRE(findings.size() == 1);
  CHECK(findings[0].severity == Severity::kError);
  CHECK(absl::StrContains(findings[0].text, "no GPU on rank 1"));
  CHECK_FALSE(findings[0].remedy.empty());
}

TEST_CASE("ranks with different versions of NCCL are told so") {
  const auto nccl = [](const char* version) { return Findings{{Severity::kOk, "nccl", version, ""}}; };
  CHECK(ExitCode(Merge({nccl("NCCL 2.28.9"), nccl("NCCL 2.28.9")})) == 0);
  const Findings merged = Merge({nccl("NCCL 2.28.9"), nccl("NCCL 2.27.3")});
  CHECK(merged[0].check == "nccl_versions");
  CHECK(absl::StrContains(merged[0].text, "NCCL 2.28.9 on rank 0, NCCL 2.27.3 on rank 1"));
  CHECK(ExitCode(merged) == 1);
}

TEST_CASE("findings survive the way to rank 0, and nonsense is refused") {
  const Findings findings = {{Severity::kWarning, "a", "text \"x\" \xff\n", "remedy"}, {Severity::kOk, "b", "", ""}};
  const std::optional<Findings> back = Unpack(Pack(findings));
  REQUIRE(back.has_value());
  REQUIRE(back->size() == 2);
  CHECK((*back)[0].severity == Severity::kWarning);
  CHECK((*back)[1].SameAs(findings[1]));
  for (const char* bad : {"", "{}", "[1]", "[{}]", R"([{"severity": "bad"}])", "[{\"severity\": \"ok\"}"}) {
    CHECK_FALSE(Unpack(bad).has_value());
  }
}

}  // namespace
}  // namespace doctor
