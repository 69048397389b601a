// SPDX-License-Identifier: Apache-2.0
// Who this process is, as its launcher or its caller says.
#ifndef LIBDDP_LAUNCH_LAUNCH_INFO_H_
#define LIBDDP_LAUNCH_LAUNCH_INFO_H_

#include <string>

#include "absl/status/statusor.h"
#include "ddp/context.h"
#include "libddp/base/env.h"

namespace ddp {

// How the ranks find each other.
enum class RendezvousMethod {
  kStore,     // in ContextOptions::store; a world of one needs none
  kMpi,       // MPI was started by the launcher, or by the program
  kTcpStore,  // in a TCP store that rank 0 serves on `store_port`
};

struct LaunchInfo {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  std::string launcher = "none";  // "mpirun", "srun", "torchrun", "mpi" (ContextOptions::mpi_comm), "none", "options"
  RendezvousMethod rendezvous = RendezvousMethod::kStore;
  // For kTcpStore. The same on all ranks of a run, another one in another run.
  int store_port = 0;
  std::string run_id;
};

// From `options` if they say it, else from the variables of a launcher (launchers.h), else a world of one.
// InvalidArgument names the option or variable that is missing, not a number, out of range, or contradicts another, and
// what to do.
absl::StatusOr<LaunchInfo> DetectLaunch(const ContextOptions& options, EnvLookup lookup = ReadEnv);

// Whether it is a world of one in a Slurm job that has room for more: as a rule somebody has forgotten srun.
bool LacksSrun(const LaunchInfo& info, EnvLookup lookup = ReadEnv);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_LAUNCH_INFO_H_
