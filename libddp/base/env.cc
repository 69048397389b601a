// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/env.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp {
namespace {

constexpr EnvInfo kTable[] = {
    {Env::kBackend, "DDP_BACKEND", "auto"},
    {Env::kTimeout, "DDP_TIMEOUT", "600"},
    {Env::kLogLevel, "DDP_LOG_LEVEL", "warn"},
    {Env::kSharedMemory, "DDP_SHARED_MEMORY", "auto"},
    {Env::kSingleCopy, "DDP_SINGLE_COPY", "auto"},
    {Env::kNodeSize, "DDP_NODE_SIZE", ""},
    {Env::kStorePort, "DDP_STORE_PORT", ""},
    {Env::kStoreSecret, "DDP_STORE_SECRET", ""},
    {Env::kXdgRuntimeDir, "XDG_RUNTIME_DIR", ""},
    {Env::kProbe, "DDP_PROBE", ""},
    {Env::kProbeCache, "DDP_PROBE_CACHE", ""},
    {Env::kFreshProbe, "DDP_FRESH_PROBE", "0"},
    {Env::kXdgCacheHome, "XDG_CACHE_HOME", ""},
    {Env::kHome, "HOME", ""},
    {Env::kStallWarning, "DDP_STALL_WARNING", "30"},
    {Env::kFlightRecorder, "DDP_FLIGHT_RECORDER", ""},
    {Env::kTrace, "DDP_TRACE", ""},
    {Env::kCheckReplicas, "DDP_CHECK_REPLICAS", "0"},
    {Env::kStagedLimits, "DDP_STAGED_LIMITS", "measure"},
    {Env::kStagedReduce, "DDP_STAGED_REDUCE", "gpu"},
    {Env::kPeerCopies, "DDP_PEER_COPIES", "never"},
    {Env::kOmpiRank, "OMPI_COMM_WORLD_RANK", ""},
    {Env::kOmpiSize, "OMPI_COMM_WORLD_SIZE", ""},
    {Env::kOmpiLocalRank, "OMPI_COMM_WORLD_LOCAL_RANK", ""},
    {Env::kOmpiLocalSize, "OMPI_COMM_WORLD_LOCAL_SIZE", ""},
    {Env::kPmiRank, "PMI_RANK", ""},
    {Env::kPmiSize, "PMI_SIZE", ""},
    {Env::kMpiLocalRankId, "MPI_LOCALRANKID", ""},
    {Env::kMpiLocalNranks, "MPI_LOCALNRANKS", ""},
    {Env::kPmixRank, "PMIX_RANK", ""},
    {Env::kSlurmProcId, "SLURM_PROCID", ""},
    {Env::kSlurmNtasks, "SLURM_NTASKS", ""},
    {Env::kSlurmStepNumTasks, "SLURM_STEP_NUM_TASKS", ""},
    {Env::kSlurmLocalId, "SLURM_LOCALID", ""},
    {Env::kSlurmStepTasksPerNode, "SLURM_STEP_TASKS_PER_NODE", ""},
    {Env::kSlurmNtasksPerNode, "SLURM_NTASKS_PER_NODE", ""},
    {Env::kSlurmNnodes, "SLURM_NNODES", ""},
    {Env::kSlurmNodeId, "SLURM_NODEID", ""},
    {Env::kSlurmJobId, "SLURM_JOB_ID", ""},
    {Env::kSlurmStepId, "SLURM_STEP_ID", ""},
    {Env::kTorchRank, "RANK", ""},
    {Env::kTorchWorldSize, "WORLD_SIZE", ""},
    {Env::kTorchLocalRank, "LOCAL_RANK", ""},
    {Env::kTorchLocalWorldSize, "LOCAL_WORLD_SIZE", ""},
    {Env::kMasterPort, "MASTER_PORT", ""},
    {Env::kTorchAgentStore, "TORCHELASTIC_USE_AGENT_STORE", ""},
    {Env::kTorchRunId, "TORCHELASTIC_RUN_ID", ""},
    {Env::kTorchRestartCount, "TORCHELASTIC_RESTART_COUNT", ""},
    {Env::kNcclLibrary, "DDP_NCCL_LIBRARY", "libnccl.so.2"},
    {Env::kNcclNthreads, "NCCL_NTHREADS", ""},
    {Env::kNcclP2pDisable, "NCCL_P2P_DISABLE", ""},
    {Env::kNcclP2pLevel, "NCCL_P2P_LEVEL", ""},
    {Env::kNcclAlgo, "NCCL_ALGO", ""},
    {Env::kNcclProto, "NCCL_PROTO", ""},
    {Env::kNcclSocketIfname, "NCCL_SOCKET_IFNAME", ""},
    {Env::kNcclBuffsize, "NCCL_BUFFSIZE", ""},
    {Env::kNcclMinCtas, "NCCL_MIN_CTAS", ""},
    {Env::kNcclMaxCtas, "NCCL_MAX_CTAS", ""},
    {Env::kNcclIbDisable, "NCCL_IB_DISABLE", ""},
    {Env::kNcclDebug, "NCCL_DEBUG", ""},
    {Env::kNcclMultiRankGpu, "NCCL_MULTI_RANK_GPU_ENABLE", ""},
};

}  // namespace

absl::Span<const EnvInfo> EnvTable() { return kTable; }

absl::string_view EnvName(Env env) { return kTable[static_cast<size_t>(env)].name; }

std::optional<std::string> ReadEnv(Env env) {
  const char* value = std::getenv(kTable[static_cast<size_t>(env)].name.data());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

void SetEnv(Env env, const std::string& value) { setenv(EnvName(env).data(), value.c_str(), 1); }

std::vector<std::string> AllVariables() {
  std::vector<std::string> all;
  for (char** variable = environ; *variable != nullptr; ++variable) all.emplace_back(*variable);
  return all;
}

absl::Status CheckEnvChoices(EnvLookup lookup) {
  struct Choice {
    Env env;
    std::vector<absl::string_view> words;
  };
  for (const auto& [env, words] : {Choice{Env::kSharedMemory, {"auto", "memfd", "posix"}},
                                   Choice{Env::kSingleCopy, {"auto", "off"}}, Choice{Env::kFreshProbe, {"0", "1"}}}) {
    const std::optional<std::string> value = lookup(env);
    if (!value.has_value() || std::find(words.begin(), words.end(), *value) != words.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(EnvName(env), " is '", *value, "'; set it to one of: ", absl::StrJoin(words, ", ")));
  }
  return absl::OkStatus();
}

}  // namespace ddp
