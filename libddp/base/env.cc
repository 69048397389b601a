#include "libddp/base/env.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp {
namespace {

constexpr EnvInfo kTable[] = {
    {Env::kBackend, "DDP_BACKEND", "auto",
     "How ranks exchange data: auto, nccl (GPUs), hierarchical (shared memory of one host) or local (a world of one "
     "rank)."},
    {Env::kTimeout, "DDP_TIMEOUT", "600",
     "Seconds that an operation, and the start of the world, may take before the group is aborted; above 0, fractions "
     "allowed."},
    {Env::kLogLevel, "DDP_LOG_LEVEL", "warn",
     "Least severe message to log on standard error: trace, debug, info, warn, error, critical or off."},
    {Env::kSharedMemory, "DDP_SHARED_MEMORY", "auto",
     "Where memory common to the ranks of a host comes from: memfd (anonymous, opened by peers through /proc), posix "
     "(shm_open, in /dev/shm) or auto (memfd where the host allows it, else posix)."},
    {Env::kSingleCopy, "DDP_SINGLE_COPY", "auto",
     "Whether a rank may copy a peer's ordinary memory straight out of its process (process_vm_readv): auto (where the "
     "host allows it) or off."},
    {Env::kNodeSize, "DDP_NODE_SIZE", "",
     "Cuts the ranks of a host into nodes of so many consecutive ranks, which then exchange messages instead of "
     "sharing "
     "memory: for trying out several nodes on one host. The same on all ranks; 1 or more. Unset, a host is a node."},
    {Env::kStorePort, "DDP_STORE_PORT", "",
     "Port of the TCP store by which ranks meet without MPI, 1 to 65535, the same on all ranks. Unset: MASTER_PORT + 1 "
     "under torchrun, a number made of the job's under Slurm."},
    {Env::kStoreSecret, "DDP_STORE_SECRET", "",
     "A text that all ranks know and nobody else, by which they know each other in a TCP store. Unset: ranks of one "
     "host use a random one in a file that only their user can read."},
    {Env::kXdgRuntimeDir, "XDG_RUNTIME_DIR", "",
     "A folder that only this user can enter, for that file; set by the system. Unset: /tmp."},
    {Env::kStallWarning, "DDP_STALL_WARNING", "30",
     "Seconds that an operation may wait for its peers before a warning says for whom; fractions allowed, 0: never."},
    {Env::kFlightRecorder, "DDP_FLIGHT_RECORDER", "",
     "File to write the last operations of all ranks to, as JSON, when a group fails or stalls."},
    {Env::kTrace, "DDP_TRACE", "",
     "File to write a timeline of all ranks to at the end, for Perfetto or chrome://tracing; set on all ranks or on "
     "none."},
    {Env::kCheckReplicas, "DDP_CHECK_REPLICAS", "0",
     "Every how many steps, from the first on, the ranks of a DistributedDataParallel compare their parameters and "
     "stop if "
     "they differ; 0: never. The same on all ranks."},
    {Env::kOmpiRank, "OMPI_COMM_WORLD_RANK", "",
     "This process's rank, 0 to size - 1; set by Open MPI's mpirun together with the three below."},
    {Env::kOmpiSize, "OMPI_COMM_WORLD_SIZE", "", "The number of ranks; set by Open MPI's mpirun."},
    {Env::kOmpiLocalRank, "OMPI_COMM_WORLD_LOCAL_RANK", "",
     "This process's rank among those of its host; set by Open MPI's mpirun."},
    {Env::kOmpiLocalSize, "OMPI_COMM_WORLD_LOCAL_SIZE", "",
     "The number of ranks on this host; set by Open MPI's mpirun."},
    {Env::kPmiRank, "PMI_RANK", "",
     "This process's rank, 0 to size - 1; set by MPICH's mpirun together with the three below."},
    {Env::kPmiSize, "PMI_SIZE", "", "The number of ranks; set by MPICH's mpirun."},
    {Env::kMpiLocalRankId, "MPI_LOCALRANKID", "",
     "This process's rank among those of its host; set by MPICH's mpirun."},
    {Env::kMpiLocalNranks, "MPI_LOCALNRANKS", "", "The number of ranks on this host; set by MPICH's mpirun."},
    {Env::kPmixRank, "PMIX_RANK", "", "Set by Slurm's srun --mpi=pmix: MPI can be started, as with PMI_RANK."},
    {Env::kSlurmProcId, "SLURM_PROCID", "",
     "This process's rank, 0 to size - 1; set by Slurm's srun, as are all of SLURM_."},
    {Env::kSlurmNtasks, "SLURM_NTASKS", "", "The number of ranks, where SLURM_STEP_NUM_TASKS does not say it."},
    {Env::kSlurmStepNumTasks, "SLURM_STEP_NUM_TASKS", "", "The number of ranks of this srun."},
    {Env::kSlurmLocalId, "SLURM_LOCALID", "", "This process's rank among those of its host."},
    {Env::kSlurmStepTasksPerNode, "SLURM_STEP_TASKS_PER_NODE", "",
     "The number of ranks on each host, as a list such as 4(x2),3."},
    {Env::kSlurmNtasksPerNode, "SLURM_NTASKS_PER_NODE", "",
     "The number of ranks on a host, where there is no such list."},
    {Env::kSlurmNnodes, "SLURM_NNODES", "", "The number of hosts; with 1 all ranks are on this one."},
    {Env::kSlurmNodeId, "SLURM_NODEID", "", "This host's place in the list of ranks on each host."},
    {Env::kSlurmJobId, "SLURM_JOB_ID", "", "The job, which with the step tells one run from another."},
    {Env::kSlurmStepId, "SLURM_STEP_ID", "", "The step of the job."},
    {Env::kTorchRank, "RANK", "", "This process's rank, 0 to size - 1; set by torchrun together with those below."},
    {Env::kTorchWorldSize, "WORLD_SIZE", "", "The number of ranks."},
    {Env::kTorchLocalRank, "LOCAL_RANK", "", "This process's rank among those of its host."},
    {Env::kTorchLocalWorldSize, "LOCAL_WORLD_SIZE", "", "The number of ranks on this host."},
    {Env::kMasterPort, "MASTER_PORT", "", "The port of torchrun's own store; see DDP_STORE_PORT."},
    {Env::kTorchAgentStore, "TORCHELASTIC_USE_AGENT_STORE", "",
     "True: torchrun's agent listens on MASTER_PORT, so rank 0 listens on the port after it; else on MASTER_PORT "
     "itself."},
    {Env::kTorchRunId, "TORCHELASTIC_RUN_ID", "",
     "The job, which with the number of restarts tells one run from another."},
    {Env::kTorchRestartCount, "TORCHELASTIC_RESTART_COUNT", "", "How often torchrun has started the ranks again."},
    {Env::kNcclLibrary, "DDP_NCCL_LIBRARY", "libnccl.so.2",
     "The NCCL library that the nccl backend loads: a path, or a name that the dynamic loader finds."},
    {Env::kNcclNthreads, "NCCL_NTHREADS", "", "Read by NCCL, checked here: threads of a block, 64, 128, 256 or 512."},
    {Env::kNcclP2pLevel, "NCCL_P2P_LEVEL", "",
     "Read by NCCL, checked here: how far apart GPUs may be to talk directly, LOC, NVL, PIX, PXB, PHB or SYS."},
    {Env::kNcclAlgo, "NCCL_ALGO", "",
     "Read by NCCL, checked here: a list of ring, tree, collnetdirect, collnetchain, nvls, nvlstree and pat."},
    {Env::kNcclProto, "NCCL_PROTO", "",
     "Read by NCCL, checked here: a list of LL, LL128 and Simple; LL128 is not to be forced."},
    {Env::kNcclSocketIfname, "NCCL_SOCKET_IFNAME", "",
     "Read by NCCL, checked here: network interfaces, = for exact names, ^ to exclude."},
    {Env::kNcclBuffsize, "NCCL_BUFFSIZE", "", "Read by NCCL, checked here: bytes, a power of 2."},
    {Env::kNcclMinCtas, "NCCL_MIN_CTAS", "", "Read by NCCL, checked here: 1 to 64."},
    {Env::kNcclMaxCtas, "NCCL_MAX_CTAS", "", "Read by NCCL, checked here: 1 to 64."},
    {Env::kNcclIbDisable, "NCCL_IB_DISABLE", "", "Read by NCCL, checked here: 0 or 1."},
    {Env::kNcclDebug, "NCCL_DEBUG", "", "Read by NCCL, checked here: VERSION, WARN, INFO or TRACE."},
    {Env::kNcclMultiRankGpu, "NCCL_MULTI_RANK_GPU_ENABLE", "",
     "1: NCCL 2.30 and later let ranks share a GPU, which is for tests; otherwise libddp refuses it."},
};

}  // namespace

absl::Span<const EnvInfo> EnvTable() { return kTable; }

absl::string_view EnvName(Env env) { return kTable[static_cast<size_t>(env)].name; }

std::optional<std::string> ReadEnv(Env env) {
  const char* value = std::getenv(kTable[static_cast<size_t>(env)].name.data());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

absl::Status CheckEnvChoices(EnvLookup lookup) {
  struct Choice {
    Env env;
    std::vector<absl::string_view> words;
  };
  for (const auto& [env, words] :
       {Choice{Env::kSharedMemory, {"auto", "memfd", "posix"}}, Choice{Env::kSingleCopy, {"auto", "off"}}}) {
    const std::optional<std::string> value = lookup(env);
    if (!value.has_value() || std::find(words.begin(), words.end(), *value) != words.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(EnvName(env), " is '", *value, "'; set it to one of: ", absl::StrJoin(words, ", ")));
  }
  return absl::OkStatus();
}

}  // namespace ddp
