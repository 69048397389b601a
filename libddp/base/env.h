// SPDX-License-Identifier: Apache-2.0
// Every environment variable that the library reads, in one table; the only place that calls getenv.
#ifndef LIBDDP_BASE_ENV_H_
#define LIBDDP_BASE_ENV_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ddp {

enum class Env {
  kBackend,                // DDP_BACKEND
  kTimeout,                // DDP_TIMEOUT
  kLogLevel,               // DDP_LOG_LEVEL
  kSharedMemory,           // DDP_SHARED_MEMORY
  kSingleCopy,             // DDP_SINGLE_COPY
  kNodeSize,               // DDP_NODE_SIZE
  kStorePort,              // DDP_STORE_PORT
  kStoreSecret,            // DDP_STORE_SECRET
  kXdgRuntimeDir,          // XDG_RUNTIME_DIR
  kProbe,                  // DDP_PROBE
  kProbeCache,             // DDP_PROBE_CACHE
  kFreshProbe,             // DDP_FRESH_PROBE
  kXdgCacheHome,           // XDG_CACHE_HOME
  kHome,                   // HOME
  kStallWarning,           // DDP_STALL_WARNING
  kFlightRecorder,         // DDP_FLIGHT_RECORDER
  kTrace,                  // DDP_TRACE
  kCheckReplicas,          // DDP_CHECK_REPLICAS
  kStagedLimits,           // DDP_STAGED_LIMITS
  kStagedReduce,           // DDP_STAGED_REDUCE
  kPeerCopies,             // DDP_PEER_COPIES
  kOmpiRank,               // OMPI_COMM_WORLD_RANK, set by Open MPI's mpirun
  kOmpiSize,               // OMPI_COMM_WORLD_SIZE
  kOmpiLocalRank,          // OMPI_COMM_WORLD_LOCAL_RANK
  kOmpiLocalSize,          // OMPI_COMM_WORLD_LOCAL_SIZE
  kPmiRank,                // PMI_RANK
  kPmiSize,                // PMI_SIZE
  kMpiLocalRankId,         // MPI_LOCALRANKID
  kMpiLocalNranks,         // MPI_LOCALNRANKS
  kPmixRank,               // PMIX_RANK
  kSlurmProcId,            // SLURM_PROCID
  kSlurmNtasks,            // SLURM_NTASKS
  kSlurmStepNumTasks,      // SLURM_STEP_NUM_TASKS
  kSlurmLocalId,           // SLURM_LOCALID
  kSlurmStepTasksPerNode,  // SLURM_STEP_TASKS_PER_NODE
  kSlurmNtasksPerNode,     // SLURM_NTASKS_PER_NODE
  kSlurmNnodes,            // SLURM_NNODES
  kSlurmNodeId,            // SLURM_NODEID
  kSlurmJobId,             // SLURM_JOB_ID
  kSlurmStepId,            // SLURM_STEP_ID
  kTorchRank,              // RANK
  kTorchWorldSize,         // WORLD_SIZE
  kTorchLocalRank,         // LOCAL_RANK
  kTorchLocalWorldSize,    // LOCAL_WORLD_SIZE
  kMasterPort,             // MASTER_PORT
  kTorchAgentStore,        // TORCHELASTIC_USE_AGENT_STORE
  kTorchRunId,             // TORCHELASTIC_RUN_ID
  kTorchRestartCount,      // TORCHELASTIC_RESTART_COUNT
  kNcclLibrary,            // DDP_NCCL_LIBRARY
  kNcclNthreads,           // NCCL_NTHREADS
  kNcclP2pDisable,         // NCCL_P2P_DISABLE
  kNcclP2pLevel,           // NCCL_P2P_LEVEL
  kNcclAlgo,               // NCCL_ALGO
  kNcclProto,              // NCCL_PROTO
  kNcclSocketIfname,       // NCCL_SOCKET_IFNAME
  kNcclBuffsize,           // NCCL_BUFFSIZE
  kNcclMinCtas,            // NCCL_MIN_CTAS
  kNcclMaxCtas,            // NCCL_MAX_CTAS
  kNcclIbDisable,          // NCCL_IB_DISABLE
  kNcclDebug,              // NCCL_DEBUG
  kNcclMultiRankGpu,       // NCCL_MULTI_RANK_GPU_ENABLE
};

struct EnvInfo {
  Env env;
  absl::string_view name;
  absl::string_view default_value;  // as documented; empty: unset
};

// One row per Env, in its order. docs/environment.md says what each means, and is checked against this.
absl::Span<const EnvInfo> EnvTable();

// The variable's value; nullopt if unset or empty.
std::optional<std::string> ReadEnv(Env env);

// All variables of this process, as "NAME=value".
std::vector<std::string> AllVariables();

// Sets the variable for this process and those that it starts. No other thread may read variables meanwhile.
void SetEnv(Env env, const std::string& value);

// Its name.
absl::string_view EnvName(Env env);

// ReadEnv, or what a test puts in its place.
using EnvLookup = absl::FunctionRef<std::optional<std::string>(Env)>;

// Checks the variables that choose one of a few words and are read where no error can be returned any more.
// InvalidArgument names the variable, its value and the words.
absl::Status CheckEnvChoices(EnvLookup lookup = ReadEnv);

}  // namespace ddp

#endif  // LIBDDP_BASE_ENV_H_
