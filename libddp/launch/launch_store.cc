// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/launch_store.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

// The stores of one rank of this process, one after the other.
struct Stores {
  std::weak_ptr<Store> current;
  int opened = 0;
  int worlds = 0;  // in the current one
};

// By process, rank and run: a child by fork begins anew, and ranks may be threads. Every process has one environment,
// and so one launcher and one port.
struct AllStores {
  std::mutex mutex;
  std::map<std::tuple<pid_t, int, int, std::string>, Stores> stores;
};
AllStores& All() {
  static auto* const all = new AllStores;
  return *all;
}

}  // namespace

absl::StatusOr<LaunchStore> OpenLaunchStore(const LaunchInfo& info, absl::Duration timeout) {
  if (info.local_world_size < info.world_size) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", info.rank, ": ", info.launcher, " has put ", info.local_world_size, " of ", info.world_size,
        " ranks on this host, and others elsewhere; between hosts ranks on CPUs need MPI: start the program with "
        "mpirun -n ",
        info.world_size, info.launcher == "srun" ? ", or srun --mpi=pmix," : "", " and a libddp built with MPI"));
  }
  Stores* stores = nullptr;
  bool next = false;
  TcpStoreOptions options;
  {
    const std::lock_guard<std::mutex> lock(All().mutex);
    stores = &All().stores[{getpid(), info.rank, info.store_port, info.run_id}];
    if (std::shared_ptr<Store> store = stores->current.lock(); store != nullptr) {
      return LaunchStore{std::move(store), absl::StrCat("world ", ++stores->worlds, "/")};
    }
    next = ++stores->opened > 1;
    options.run_id = next ? absl::StrCat(info.run_id, ", store ", stores->opened) : info.run_id;
  }
  options.port = info.store_port;
  options.serve = info.rank == 0;
  options.world_size = info.world_size;
  options.timeout = timeout;
  absl::StatusOr<std::shared_ptr<Store>> store =
      next ? CreateNextTcpStore(std::move(options)) : CreateTcpStore(std::move(options));
  const std::lock_guard<std::mutex> lock(All().mutex);
  if (!store.ok()) {
    --stores->opened;  // the next one still has the number by which the other ranks know it
    return absl::Status(store.status().code(), absl::StrCat("rank ", info.rank, ": ", store.status().message()));
  }
  stores->current = *store;
  stores->worlds = 1;
  return LaunchStore{*std::move(store), ""};
}

}  // namespace ddp
