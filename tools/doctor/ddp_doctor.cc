// Says in a few seconds why training would fail or crawl on this machine.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ddp/collectives.h"
#include "ddp/context.h"
#include "ddp/store.h"
#include "examples/train/environment.h"
#include "libddp/comm/probe/probe_nccl.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/facts.h"
#include "tools/doctor/report.h"

namespace doctor {
namespace {

constexpr char kUsage[] =
    "Usage: ddp_doctor [--json] [--report FILE] [--no-probe] [--limit SECONDS]\n"
    "       mpirun -n N ddp_doctor ...\n\n"
    "Looks for what makes training fail or crawl on this machine: GPUs, driver, CUDA, NCCL, PCIe, memory limits,\n"
    "binding, variables. Each finding says what to do. Then it tries NCCL out between the GPUs, on data whose result "
    "is\n"
    "known. Started by mpirun, it does so for all ranks, one GPU each; alone, between all GPUs of this machine.\n\n"
    "  --json            prints JSON\n"
    "  --report FILE     writes a file with the findings and a description of the machine, to attach to an issue;\n"
    "                    the description names no host, user or file\n"
    "  --no-probe        does not try NCCL out\n"
    "  --limit SECONDS   time for trying NCCL out, 30 by default\n\n"
    "The exit code is 1 if there is an error, 2 after a wrong flag, else 0.\n";

struct Flags {
  bool json = false, probe = true;
  std::string report;
  double limit = 30;
};

bool Parse(int argc, char** argv, Flags& flags) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      flags.json = true;
    } else if (flag == "--no-probe") {
      flags.probe = false;
    } else if (flag == "--report" && i + 1 < argc) {
      flags.report = argv[++i];
    } else if (flag == "--limit" && i + 1 < argc && absl::SimpleAtod(argv[i + 1], &flags.limit) && flags.limit > 0) {
      ++i;
    } else {
      std::fprintf(stderr, "ddp_doctor: %s is no flag, or lacks its value; see --help\n", flag.c_str());
      return false;
    }
  }
  return true;
}

ddp::ProbeNcclOptions ProbeOptionsOf(const Flags& flags, int gpu) {
  ddp::ProbeNcclOptions options;
  options.device = {ddp::Device::Kind::kCuda, static_cast<int16_t>(gpu)};
  options.limit = absl::Seconds(flags.limit);
  options.fresh = true;
  options.remember = false;  // it looks, and changes nothing
  return options;
}

Finding Failed(const char* check, const absl::Status& status) {
  return {Severity::kError, check, std::string(status.message()), "see the other findings"};
}

Finding FindingOf(const absl::StatusOr<ddp::ProbeReport>& report) {
  return report.ok() ? CheckProbe(*report) : Failed("nccl_probe", report.status());
}

// Between all GPUs of this process: a thread for each, as a rank.
Finding ProbeAlone(const Flags& flags, int gpus) {
  const std::shared_ptr<ddp::Store> store = ddp::CreateMemoryStore();
  std::vector<absl::StatusOr<ddp::ProbeReport>> reports(static_cast<size_t>(gpus));
  std::vector<std::thread> threads;
  threads.reserve(reports.size());
  for (int gpu = 0; gpu < gpus; ++gpu) {
    threads.emplace_back([&, gpu] {
      ddp::ContextOptions options;
      options.rank = gpu;
      options.world_size = gpus;
      options.store = store;
      options.backend = "hierarchical";
      absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
      reports[static_cast<size_t>(gpu)] = context.ok() ? ddp::ProbeNccl((*context)->world(), ProbeOptionsOf(flags, gpu))
                                                       : absl::StatusOr<ddp::ProbeReport>(context.status());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return FindingOf(reports[0]);
}

// One answer for all ranks: whether each has a GPU. `findings` gets what is wrong where only some have.
bool AllHaveGpus(ddp::ProcessGroup& world, const Facts& facts, Findings& findings) {
  const absl::StatusOr<std::vector<std::string>> all = ddp::GatherStrings(world, facts.gpus.empty() ? "" : "GPU");
  if (!all.ok()) return false;
  std::vector<bool> sees_gpu;
  for (const std::string& one : *all) sees_gpu.push_back(!one.empty());
  for (const Finding& finding : CheckGpusOfRanks(sees_gpu)) findings.push_back(finding);
  return std::find(sees_gpu.begin(), sees_gpu.end(), false) == sees_gpu.end();
}

// What every rank finds, in rank order.
absl::StatusOr<std::vector<Findings>> Examine(const Flags& flags, const Facts& facts, ddp::Context& context) {
  Findings mine = Check(facts);
  ddp::ProcessGroup& world = context.world();
  if (context.world_size() == 1) {
    if (flags.probe && !facts.gpus.empty()) mine.push_back(ProbeAlone(flags, static_cast<int>(facts.gpus.size())));
    return std::vector<Findings>{mine};
  }
  if (flags.probe && AllHaveGpus(world, facts, mine)) {
    const int gpu = facts.gpus.size() == 1 ? 0 : context.local_rank();
    mine.push_back(FindingOf(ddp::ProbeNccl(world, ProbeOptionsOf(flags, gpu))));
  }
  const absl::StatusOr<std::vector<std::string>> packed = ddp::GatherStrings(world, Pack(mine));
  if (!packed.ok()) return packed.status();
  std::vector<Findings> all;
  for (const std::string& text : *packed) all.push_back(Unpack(text).value_or(Findings{}));
  return all;
}

int Main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--help") {
      std::fputs(kUsage, stdout);
      return 0;
    }
  }
  Flags flags;
  if (!Parse(argc, argv, flags)) return 2;
  const Facts facts = GatherFacts();
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create({.backend = "auto"});
  std::vector<Findings> by_rank;
  if (context.ok()) {
    absl::StatusOr<std::vector<Findings>> examined = Examine(flags, facts, **context);
    by_rank = examined.ok() ? *std::move(examined)
                            : std::vector<Findings>{{Failed("ranks", examined.status())}, Check(facts)};
  } else {
    by_rank = {Check(facts)};
    by_rank[0].push_back(Failed("start", context.status()));
  }
  const int ranks = context.ok() ? (*context)->world_size() : 1;
  const Findings findings = Merge(by_rank);
  if (!context.ok() || (*context)->rank() == 0) {
    std::fputs((flags.json ? ToJson(findings, ranks) : ToText(findings, ranks)).c_str(), stdout);
    if (!flags.report.empty()) {
      const std::string machine = examples::DescribeEnvironment(facts.launcher, !facts.gpus.empty());
      std::ofstream file(flags.report);
      file << ToJson(findings, ranks, machine);
      if (!file.flush().good()) {
        std::fprintf(stderr, "ddp_doctor: %s cannot be written\n", flags.report.c_str());
        return 1;
      }
    }
  }
  // The other ranks have told rank 0.
  return !context.ok() || (*context)->rank() == 0 ? ExitCode(findings) : 0;
}

}  // namespace
}  // namespace doctor

int main(int argc, char** argv) { return doctor::Main(argc, argv); }
