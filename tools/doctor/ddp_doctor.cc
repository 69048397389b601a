// SPDX-License-Identifier: Apache-2.0
// Says in a few seconds why training would fail or crawl on this machine.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/collectives.h"
#include "ddp/context.h"
#include "ddp/store.h"
#include "examples/train/environment.h"
#include "libddp/base/env.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/auto_group.h"
#include "libddp/comm/base/progress_thread.h"
#include "libddp/comm/probe/probe_nccl.h"
#include "libddp/launch/launch_info.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/copies.h"
#include "tools/doctor/facts.h"
#include "tools/doctor/report.h"
#include "tools/doctor/watch.h"

namespace doctor {
namespace {

constexpr double kLimit = 20;

constexpr char kUsage[] =
    "Usage: ddp_doctor [--json] [--report FILE] [--no-probe] [--limit SECONDS]\n"
    "       mpirun -n N ddp_doctor ...\n\n"
    "Looks for what makes training fail or crawl on this machine: GPUs, driver, CUDA, NCCL, PCIe, memory limits,\n"
    "binding, variables. Each finding says what to do. Then it tries out NCCL and copies between the GPUs, on data\n"
    "whose result is known, and says which backend auto would choose, and why. Started by mpirun, it does so for all\n"
    "ranks, one GPU each; alone, between all GPUs of this machine. Where nothing is wrong, that takes some seconds.\n\n"
    "  --json            prints JSON\n"
    "  --report FILE     writes a file with the findings and a description of the machine, to attach to an issue;\n"
    "                    the description names no host, user or file\n"
    "  --no-probe        tries nothing out\n"
    "  --limit SECONDS   time for everything, 20 by default; what is cut off is named\n\n"
    "The exit code is 1 if there is an error, 2 after a wrong flag, else 0.\n";

struct Flags {
  bool json = false, probe = true;
  std::string report;
  absl::Duration limit = absl::Seconds(kLimit);
};

bool Parse(int argc, char** argv, Flags& flags) {
  double seconds = kLimit;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      flags.json = true;
    } else if (flag == "--no-probe") {
      flags.probe = false;
    } else if (flag == "--report" && i + 1 < argc) {
      flags.report = argv[++i];
    } else if (flag == "--limit" && i + 1 < argc) {
      if (!absl::SimpleAtod(argv[++i], &seconds) || !(seconds > 0)) {
        std::fprintf(stderr, "ddp_doctor: --limit %s is no number of seconds above 0; see --help\n", argv[i]);
        return false;
      }
      flags.limit = absl::Seconds(seconds);
    } else {
      std::fprintf(stderr, "ddp_doctor: %s is no flag, or lacks its value; see --help\n", flag.c_str());
      return false;
    }
  }
  return true;
}

Finding Failed(const char* check, const absl::Status& status) {
  return {Severity::kError, check, std::string(status.message()), "see the other findings"};
}

void Append(const Findings& from, Findings& to) { to.insert(to.end(), from.begin(), from.end()); }

// The time of one run.
struct Clock {
  absl::Duration limit;
  absl::Time start = absl::Now();
  // A part of the limit is over. What can hang is given its time by these; the rest is for what is slow to give up.
  absl::Time At(double part) const { return start + part * limit; }
  absl::Time parts_end() const { return At(0.85); }
  absl::Duration left() const { return std::max(parts_end() - absl::Now(), absl::Seconds(1)); }
};

ddp::AutoGroupOptions TrialOptions(const Clock& clock, int gpu) {
  ddp::AutoGroupOptions options;
  options.device = {ddp::Device::Kind::kCuda, static_cast<int16_t>(gpu)};
  options.timeout = clock.left();
  options.probe.device = options.device;
  options.probe.end = clock.parts_end();
  options.probe.least = absl::Seconds(1);
  options.probe.more_time = absl::StrCat("give it more: ", MoreTime(clock.limit));
  options.probe.fresh = true;
  options.probe.remember = false;  // it looks, and changes nothing
  return options;
}

// NCCL and the other backend between the ranks' GPUs, and what auto would make of them.
absl::StatusOr<Findings> TryBackends(const Clock& clock, ddp::ProcessGroup& world, int gpu) {
  ddp::ProgressThread progress;
  ddp::AutoGroupOptions options = TrialOptions(clock, gpu);
  options.progress = &progress;
  if (world.size() == 1) {
    const absl::StatusOr<ddp::ProbeReport> report = ddp::ProbeNccl(world, options.probe);
    if (!report.ok()) return report.status();
    return Findings{CheckProbe(*report),
                    {Severity::kOk, "auto_choice", "auto chooses local: there is one GPU only", ""}};
  }
  AutoFacts facts;
  facts.backend = ddp::ReadEnv(ddp::Env::kBackend).value_or("");
  facts.fresh = ddp::ReadEnv(ddp::Env::kFreshProbe) == "1";
  facts.remembers = !options.probe.cache.empty();
  ddp::ProbeNcclOptions next_start = options.probe;
  next_start.fresh = false;
  absl::StatusOr<std::optional<ddp::ProbeReport>> remembered = ddp::RecallProbe(world, next_start);
  if (!remembered.ok()) return remembered.status();
  facts.remembered = *std::move(remembered);
  absl::StatusOr<std::unique_ptr<ddp::ProcessGroup>> control = world.Split(0, world.rank());
  if (!control.ok()) return control.status();
  const absl::StatusOr<ddp::AutoPrediction> prediction = ddp::PredictAutoGroup(*std::move(control), options);
  if (!prediction.ok()) return prediction.status();
  facts.choice = prediction->choice.backend;
  facts.why = std::string(absl::StripPrefix(prediction->choice.text, "backend "));
  facts.verdict = prediction->report.verdict;
  Findings findings = {CheckProbe(prediction->report)};
  Append(CheckChoice(facts), findings);
  return findings;
}

Findings FindingsOf(const absl::StatusOr<Findings>& findings) {
  return findings.ok() ? *findings : Findings{Failed("nccl_probe", findings.status())};
}

// Between all GPUs of this process: a thread for each, as a rank.
Findings TryBackendsAlone(const Clock& clock, int gpus) {
  const std::shared_ptr<ddp::Store> store = ddp::CreateMemoryStore();
  std::vector<absl::StatusOr<Findings>> findings(static_cast<size_t>(gpus));
  std::vector<std::thread> threads;
  threads.reserve(findings.size());
  for (int gpu = 0; gpu < gpus; ++gpu) {
    threads.emplace_back([&, gpu] {
      ddp::ContextOptions options;
      options.rank = gpu;
      options.world_size = gpus;
      options.store = store;
      options.backend = "hierarchical";
      options.timeout = clock.left();
      absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
      findings[static_cast<size_t>(gpu)] =
          context.ok() ? TryBackends(clock, (*context)->world(), gpu) : absl::StatusOr<Findings>(context.status());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return FindingsOf(findings[0]);
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

// How many processors the ranks of this host may use, all of them together; 0: unknown.
int SharedProcessors(ddp::ProcessGroup& world, const Facts& facts) {
  const std::string prefix = absl::StrCat(ddp::HostId(), " ");
  const absl::StatusOr<std::vector<std::string>> all =
      ddp::GatherStrings(world, absl::StrCat(prefix, absl::StrJoin(facts.processors, ",")));
  if (!all.ok()) return 0;
  std::set<int> processors;
  for (const std::string& one : *all) {
    if (!absl::StartsWith(one, prefix)) continue;
    for (const int processor : ParseList(one.substr(prefix.size()))) processors.insert(processor);
  }
  return static_cast<int>(processors.size());
}

// What every rank finds, in rank order. `watch` hears what this one has found so far.
absl::StatusOr<std::vector<Findings>> Examine(const Flags& flags, const Clock& clock, Facts facts,
                                              ddp::Context& context, Watch& watch) {
  ddp::ProcessGroup& world = context.world();
  facts.shared_processors = SharedProcessors(world, facts);
  Findings mine = Check(facts);
  const bool alone = context.world_size() == 1;
  watch.Begin("the check of NCCL between the GPUs");
  if (alone && flags.probe && !facts.gpus.empty()) {
    Append(TryBackendsAlone(clock, static_cast<int>(facts.gpus.size())), mine);
  } else if (!alone && flags.probe && AllHaveGpus(world, facts, mine)) {
    Append(FindingsOf(TryBackends(clock, world, facts.gpus.size() == 1 ? 0 : context.local_rank())), mine);
  }
  watch.Found(mine);
  // After NCCL's check, whose processes need GPUs that admit one process only. One rank of a host copies for all.
  if (flags.probe && !facts.gpus.empty() && context.local_rank() == 0) {
    watch.Begin("copies between the GPUs");
    Append(CheckCopies(TryCopies("libcuda.so.1", clock.left())), mine);
    watch.Found(mine);
  }
  if (alone) return std::vector<Findings>{mine};
  watch.Begin("gathering what the ranks have found");
  const absl::StatusOr<std::vector<std::string>> packed = ddp::GatherStrings(world, Pack(mine));
  if (!packed.ok()) return packed.status();
  std::vector<Findings> all;
  for (const std::string& text : *packed) all.push_back(Unpack(text).value_or(Findings{}));
  return all;
}

// Prints what has been found, and writes the report; the exit code.
int Say(const Flags& flags, const Findings& findings, int ranks, const std::string& machine) {
  std::fputs((flags.json ? ToJson(findings, ranks) : ToText(findings, ranks)).c_str(), stdout);
  std::fflush(stdout);
  if (flags.report.empty()) return ExitCode(findings);
  std::ofstream file(flags.report);
  file << ToJson(findings, ranks, machine);
  if (file.flush().good()) return ExitCode(findings);
  std::fprintf(stderr, "ddp_doctor: %s cannot be written\n", flags.report.c_str());
  return 1;
}

std::atomic<int> exit_code{-1};  // once everything has been said

// Ends the process when the time is over.
Watch& StartWatch(const Flags& flags, const Clock& clock, int rank, int ranks) {
  const auto late = [flags, rank, ranks](const Findings& findings) {
    if (exit_code >= 0) _exit(exit_code);
    if (rank == 0) {
      Say(flags, Merge({findings}), ranks, "");
    } else {
      std::fprintf(stderr, "rank %d:\n%s", rank, ToText(Merge({findings}), 1).c_str());
    }
    _exit(1);
  };
  // Rank 0's end makes mpirun end the others, who speak first.
  static auto* const watch = new Watch(clock.At(rank == 0 ? 1 : 0.95), flags.limit, late);
  return *watch;  // is there as long as the process, whose end may hang, too
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
  const Clock clock{flags.limit};
  const absl::StatusOr<ddp::LaunchInfo> launch = ddp::DetectLaunch({});
  const int rank = launch.ok() ? launch->rank : 0, ranks = launch.ok() ? launch->world_size : 1;
  Watch& watch = StartWatch(flags, clock, rank, ranks);
  FactSources sources;
  sources.progress = [&watch](const char* what) { watch.Begin(what); };
  const Facts facts = GatherFacts(sources);
  watch.Found(Check(facts));
  watch.Begin("the start of the ranks, by MPI or the store");
  ddp::ContextOptions options;
  options.backend = "auto";
  options.timeout = clock.left();
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
  std::vector<Findings> by_rank = {Check(facts)};
  absl::Status status = context.status();
  if (context.ok()) {
    absl::StatusOr<std::vector<Findings>> examined = Examine(flags, clock, facts, **context, watch);
    status = examined.status();
    if (examined.ok()) by_rank = *std::move(examined);
  }
  if (!status.ok()) by_rank[0].push_back(Failed(context.ok() ? "ranks" : "start", status));
  if (context.ok() && (*context)->rank() != 0) return 0;  // it has told rank 0
  if (!context.ok() && rank != 0) {
    std::fprintf(stderr, "rank %d:\n%s", rank, ToText(Merge(by_rank), 1).c_str());
    return 1;
  }
  watch.Begin("describing the machine");
  const std::string machine =
      flags.report.empty() ? "" : examples::DescribeEnvironment(facts.launcher, !facts.gpus.empty());
  exit_code = Say(flags, Merge(by_rank), context.ok() ? (*context)->world_size() : ranks, machine);
  if (!status.ok() && ranks > 1) absl::SleepFor(clock.At(0.97) - absl::Now());  // others may have to say why
  return exit_code;
}

}  // namespace
}  // namespace doctor

int main(int argc, char** argv) { return doctor::Main(argc, argv); }
