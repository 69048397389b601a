// SPDX-License-Identifier: Apache-2.0
// The launchers that libddp knows, by the variables with which they tell each process its place.
#ifndef LIBDDP_LAUNCH_LAUNCHERS_H_
#define LIBDDP_LAUNCH_LAUNCHERS_H_

#include <array>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "libddp/base/env.h"
#include "libddp/launch/launch_info.h"

namespace ddp {

struct Launcher {
  absl::string_view name;     // LaunchInfo::launcher
  absl::string_view product;  // as errors call it
  // Others may run inside of it, and then know better: an mpirun or a torchrun that was started by srun. So it is the
  // last that is asked, and may contradict the others.
  bool outermost;
  // Rank, world size, local rank, local world size.
  std::array<Env, 4> variables;
  // The value of one of `variables`, for those launchers that do not simply set it.
  std::optional<std::string> (*read)(Env variable, EnvLookup lookup);
  // Fills in how the ranks meet.
  absl::Status (*meet)(EnvLookup lookup, LaunchInfo& info);
};

// In the order in which they are asked.
absl::Span<const Launcher> Launchers();

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_LAUNCHERS_H_
