// The store by which ranks meet under a launcher that has none for us.
#ifndef LIBDDP_LAUNCH_LAUNCH_STORE_H_
#define LIBDDP_LAUNCH_LAUNCH_STORE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/store.h"
#include "libddp/launch/launch_info.h"

namespace ddp {

// A TCP store served by rank 0, for RendezvousMethod::kTcpStore. FailedPrecondition if the launcher has put ranks on
// several hosts: between those only MPI carries what they send.
absl::StatusOr<std::shared_ptr<Store>> OpenLaunchStore(const LaunchInfo& info, absl::Duration timeout);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_LAUNCH_STORE_H_
