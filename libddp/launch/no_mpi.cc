// SPDX-License-Identifier: Apache-2.0
#include "absl/status/status.h"
#include "libddp/launch/mpi_session.h"

namespace ddp {

bool MpiSession::Available() { return false; }

absl::StatusOr<std::unique_ptr<MpiSession>> MpiSession::Adopt(const void* /*handle*/) {
  return absl::UnimplementedError(
      "ContextOptions::mpi_comm is set, but this build of libddp has no MPI; configure it with -DDDP_WITH_MPI=ON, with "
      "the MPI that the program uses");
}

absl::StatusOr<std::unique_ptr<MpiSession>> MpiSession::Open(const LaunchInfo& /*info*/) {
  return absl::UnimplementedError(
      "this build of libddp has no MPI; install libopenmpi-dev and configure with -DDDP_WITH_MPI=ON, or start the "
      "ranks "
      "of one host with torchrun or srun, or set rank, world_size and store in ContextOptions");
}

}  // namespace ddp
