// SPDX-License-Identifier: Apache-2.0
// The store by which ranks meet under a launcher that has none for us.
#ifndef LIBDDP_LAUNCH_LAUNCH_STORE_H_
#define LIBDDP_LAUNCH_LAUNCH_STORE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/store.h"
#include "libddp/launch/launch_info.h"

namespace ddp {

struct LaunchStore {
  std::shared_ptr<Store> store;
  // Begins the keys of this world: several worlds of one process may share the store.
  std::string prefix;
};

// A TCP store served by rank 0, where the ranks meet in one. FailedPrecondition if the launcher has put ranks on
// several hosts: between those only MPI carries what they send.
//
// The launcher gives a process one port. So worlds that exist at the same time share one store, and one that begins
// after all others have ended has a store of its own. All ranks begin and end their worlds in the same order.
absl::StatusOr<LaunchStore> OpenLaunchStore(const LaunchInfo& info, absl::Duration timeout);

// CreateTcpStore for a process that has had a store on the same port: what still serves that one is waited out.
absl::StatusOr<std::shared_ptr<Store>> CreateNextTcpStore(TcpStoreOptions options);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_LAUNCH_STORE_H_
