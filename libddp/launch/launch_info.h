// Who this process is, as its launcher or its caller says.
#ifndef LIBDDP_LAUNCH_LAUNCH_INFO_H_
#define LIBDDP_LAUNCH_LAUNCH_INFO_H_

#include <string>

#include "absl/status/statusor.h"
#include "ddp/context.h"
#include "libddp/base/env.h"

namespace ddp {

struct LaunchInfo {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  std::string launcher = "none";  // "mpirun", "none", "options"
};

// From `options` if they say it, else from Open MPI's variables, else a world of one. InvalidArgument names the option
// or variable that is missing, not a number, out of range, or contradicts another, and what to do.
absl::StatusOr<LaunchInfo> DetectLaunch(const ContextOptions& options, EnvLookup lookup = ReadEnv);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_LAUNCH_INFO_H_
