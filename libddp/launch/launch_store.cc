#include "libddp/launch/launch_store.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp {

absl::StatusOr<std::shared_ptr<Store>> OpenLaunchStore(const LaunchInfo& info, absl::Duration timeout) {
  if (info.local_world_size < info.world_size) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", info.rank, ": ", info.launcher, " has put ", info.local_world_size, " of ", info.world_size,
        " ranks on this host, and others elsewhere; between hosts ranks on CPUs need MPI: start the program with "
        "mpirun -n ",
        info.world_size, info.launcher == "srun" ? ", or srun --mpi=pmix," : "", " and a libddp built with MPI"));
  }
  TcpStoreOptions options;
  options.port = info.store_port;
  options.serve = info.rank == 0;
  options.run_id = info.run_id;
  options.world_size = info.world_size;
  options.timeout = timeout;
  absl::StatusOr<std::shared_ptr<Store>> store = CreateTcpStore(std::move(options));
  if (store.ok()) return store;
  return absl::Status(store.status().code(), absl::StrCat("rank ", info.rank, ": ", store.status().message()));
}

}  // namespace ddp
