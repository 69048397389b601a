#include "libddp/base/env.h"

#include <cstdlib>

namespace ddp {
namespace {

constexpr EnvInfo kTable[] = {
    {Env::kBackend, "DDP_BACKEND", "auto",
     "How ranks exchange data: auto, hierarchical (shared memory of one host) or local (a world of one rank)."},
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
    {Env::kOmpiRank, "OMPI_COMM_WORLD_RANK", "",
     "This process's rank, 0 to size - 1; set by Open MPI's mpirun together with the three below."},
    {Env::kOmpiSize, "OMPI_COMM_WORLD_SIZE", "", "The number of ranks; set by Open MPI's mpirun."},
    {Env::kOmpiLocalRank, "OMPI_COMM_WORLD_LOCAL_RANK", "",
     "This process's rank among those of its host; set by Open MPI's mpirun."},
    {Env::kOmpiLocalSize, "OMPI_COMM_WORLD_LOCAL_SIZE", "",
     "The number of ranks on this host; set by Open MPI's mpirun."},
};

}  // namespace

absl::Span<const EnvInfo> EnvTable() { return kTable; }

std::optional<std::string> ReadEnv(Env env) {
  const char* value = std::getenv(kTable[static_cast<size_t>(env)].name.data());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

}  // namespace ddp
