// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/launchers.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "libddp/launch/mpi_session.h"

namespace ddp {
namespace {

constexpr int kMaxPort = 65535;

absl::StatusOr<int> ParsePort(Env variable, absl::string_view text) {
  int port = 0;
  if (absl::SimpleAtoi(text, &port) && port >= 1 && port <= kMaxPort) return port;
  return absl::InvalidArgumentError(
      absl::StrCat(EnvName(variable), "=", text, " is no port; set it to a number from 1 to ", kMaxPort));
}

// DDP_STORE_PORT, else `otherwise`.
absl::StatusOr<int> StorePort(EnvLookup lookup, const absl::StatusOr<int>& otherwise) {
  const std::optional<std::string> text = lookup(Env::kStorePort);
  return text ? ParsePort(Env::kStorePort, *text) : otherwise;
}

std::optional<std::string> Plain(Env variable, EnvLookup lookup) { return lookup(variable); }

absl::Status MeetByMpi(EnvLookup /*lookup*/, LaunchInfo& info) {
  info.rendezvous = RendezvousMethod::kMpi;
  return absl::OkStatus();
}

// Slurm's srun sets PMI_RANK and PMI_SIZE too (--mpi=pmi2); MPICH's own launcher is known by the local ranks.
std::optional<std::string> ReadHydra(Env variable, EnvLookup lookup) {
  if (lookup(Env::kSlurmProcId) && !lookup(Env::kMpiLocalRankId)) return std::nullopt;
  return lookup(variable);
}

// MASTER_PORT is where torchrun's agent listens, or, where that is not so, where rank 0 shall.
absl::StatusOr<int> MasterPort(EnvLookup lookup) {
  const std::optional<std::string> text = lookup(Env::kMasterPort);
  if (!text) {
    return absl::InvalidArgumentError(
        "MASTER_PORT is not set but others of torchrun's variables are; start the program with torchrun, or set "
        "DDP_STORE_PORT to a free port, the same on all ranks");
  }
  absl::StatusOr<int> port = ParsePort(Env::kMasterPort, *text);
  if (!port.ok() || lookup(Env::kTorchAgentStore) != "True") return port;
  if (*port < kMaxPort) return *port + 1;
  return absl::InvalidArgumentError("MASTER_PORT=65535 leaves no port after it; set DDP_STORE_PORT to a free one");
}

absl::Status MeetByTorchrun(EnvLookup lookup, LaunchInfo& info) {
  if (info.world_size == 1) return absl::OkStatus();
  const absl::StatusOr<int> port = StorePort(lookup, MasterPort(lookup));
  if (!port.ok()) return port.status();
  info.rendezvous = RendezvousMethod::kTcpStore;
  info.store_port = *port;
  info.run_id = absl::StrCat("torchrun ", lookup(Env::kTorchRunId).value_or(""), "/",
                             lookup(Env::kTorchRestartCount).value_or("0"));
  return absl::OkStatus();
}

// The number of tasks on node `node` of a list such as "4(x2),3": four on each of the first two, three on the third.
std::optional<std::string> TasksOnNode(absl::string_view list, int64_t node) {
  for (const absl::string_view part : absl::StrSplit(list, ',')) {
    const size_t repeat = part.find("(x");
    int64_t nodes = 1;
    if (repeat != absl::string_view::npos) {
      absl::string_view text = part.substr(repeat + 2);
      if (!absl::ConsumeSuffix(&text, ")") || !absl::SimpleAtoi(text, &nodes) || nodes < 1) break;
    }
    if (node < nodes) return std::string(part.substr(0, repeat));
    node -= nodes;
  }
  return std::nullopt;
}

// A batch script has a rank, too, and the number of tasks of its job, but nobody has started the other ones.
bool InSlurmStep(EnvLookup lookup) { return lookup(Env::kSlurmStepId) || lookup(Env::kSlurmStepNumTasks); }

// A step (one srun) may have fewer tasks than its job. What it does not say is told by the job.
std::optional<std::string> ReadSlurm(Env variable, EnvLookup lookup) {
  if (!InSlurmStep(lookup)) return std::nullopt;
  if (variable == Env::kSlurmNtasks) {
    const std::optional<std::string> step = lookup(Env::kSlurmStepNumTasks);
    return step ? step : lookup(Env::kSlurmNtasks);
  }
  if (variable != Env::kSlurmStepTasksPerNode) return lookup(variable);
  if (const std::optional<std::string> list = lookup(variable)) {
    int64_t node = 0;
    if (!absl::SimpleAtoi(lookup(Env::kSlurmNodeId).value_or("0"), &node) || node < 0) return list;
    const std::optional<std::string> tasks = TasksOnNode(*list, node);
    return tasks ? tasks : list;  // an error that shows it
  }
  const std::optional<std::string> world_size = ReadSlurm(Env::kSlurmNtasks, lookup);
  const std::optional<std::string> per_node = lookup(Env::kSlurmNtasksPerNode);
  int wanted = 0;
  int all = 0;
  if (per_node && absl::SimpleAtoi(*per_node, &wanted) && world_size && absl::SimpleAtoi(*world_size, &all)) {
    return absl::StrCat(std::min(wanted, all));
  }
  if (per_node) return per_node;
  return lookup(Env::kSlurmNnodes).value_or("1") == "1" ? world_size : std::nullopt;
}

// A port that the steps of one host are unlikely to share, below the range from which systems give them to clients.
int SlurmPort(EnvLookup lookup) {
  uint32_t job = 0;
  uint32_t step = 0;
  // What is no number is none: the port need not be unique.
  (void)absl::SimpleAtoi(lookup(Env::kSlurmJobId).value_or("0"), &job);
  (void)absl::SimpleAtoi(lookup(Env::kSlurmStepId).value_or("0"), &step);
  return static_cast<int>(20000 + (job * 16 + step) % 10000);
}

// With PMI, srun has prepared the start of MPI; without it, each process would be an MPI world of its own.
absl::Status MeetBySlurm(EnvLookup lookup, LaunchInfo& info) {
  if ((lookup(Env::kPmiRank) || lookup(Env::kPmixRank)) && MpiSession::Available()) return MeetByMpi(lookup, info);
  if (info.world_size == 1) return absl::OkStatus();
  const absl::StatusOr<int> port = StorePort(lookup, SlurmPort(lookup));
  if (!port.ok()) return port.status();
  info.rendezvous = RendezvousMethod::kTcpStore;
  info.store_port = *port;
  info.run_id =
      absl::StrCat("slurm ", lookup(Env::kSlurmJobId).value_or(""), ".", lookup(Env::kSlurmStepId).value_or(""));
  return absl::OkStatus();
}

constexpr Launcher kLaunchers[] = {
    {"mpirun",
     "Open MPI's mpirun",
     false,
     {Env::kOmpiRank, Env::kOmpiSize, Env::kOmpiLocalRank, Env::kOmpiLocalSize},
     Plain,
     MeetByMpi},
    {"mpirun",
     "MPICH's mpirun",
     false,
     {Env::kPmiRank, Env::kPmiSize, Env::kMpiLocalRankId, Env::kMpiLocalNranks},
     ReadHydra,
     MeetByMpi},
    {"torchrun",
     "torchrun",
     false,
     {Env::kTorchRank, Env::kTorchWorldSize, Env::kTorchLocalRank, Env::kTorchLocalWorldSize},
     Plain,
     MeetByTorchrun},
    {"srun",
     "Slurm's srun",
     true,
     {Env::kSlurmProcId, Env::kSlurmNtasks, Env::kSlurmLocalId, Env::kSlurmStepTasksPerNode},
     ReadSlurm,
     MeetBySlurm},
};

}  // namespace

absl::Span<const Launcher> Launchers() { return kLaunchers; }

}  // namespace ddp
