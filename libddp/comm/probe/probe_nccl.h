// SPDX-License-Identifier: Apache-2.0
// Whether NCCL works between the GPUs of a group's ranks, found out before anybody relies on it.
#ifndef LIBDDP_COMM_PROBE_PROBE_NCCL_H_
#define LIBDDP_COMM_PROBE_PROBE_NCCL_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "ddp/types.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/comm/probe/probe_cache.h"
#include "libddp/comm/probe/verdict.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

struct ProbeNcclOptions {
  Device device = {};
  // Of one attempt, of which there are three at most. Less than the time-out of the control group.
  absl::Duration limit = absl::Seconds(30);
  // Each attempt takes at most half of the time until then, but gets `least` in any case: a GPU and NCCL need some
  // seconds to start where nothing is wrong.
  absl::Time end = absl::InfiniteFuture();
  absl::Duration least = absl::Seconds(5);
  std::string more_time = kMoreTime;       // what gives it more
  std::string helper = {};                 // see FindProbeHelper
  std::string cache = ProbeCacheFolder();  // empty: nothing is remembered
  bool fresh = false;                      // looks again in spite of what is remembered
  bool remember = true;                    // what was found; the ranks say the same
  // Adds to a report that says kWorksWithoutP2p what else has to be known then, before it is remembered. Collective.
  // May be empty; such a report is not remembered then.
  std::function<absl::Status(ProbeReport&)> complete = {};
  // What works in this process.
  DeviceRuntime* runtime = CudaDevices();
  std::optional<nccl::Api> api = {};  // unset: loaded
  std::string root = {};              // "/proc" is looked for in this folder
  std::string host = HostId();        // equal on the ranks of one host
};

// How long an attempt may take that usually has `usual`; see ProbeNcclOptions::end.
struct AttemptTime {
  absl::Duration time;
  bool is_short = false;  // less than half of the usual time: a slow start may be taken for a hang
  // For ProbeResult::short_ms.
  int32_t short_ms() const { return is_short ? static_cast<int32_t>(absl::ToInt64Milliseconds(time)) : 0; }
};
AttemptTime TimeOfAttempt(absl::Duration usual, absl::Time end, absl::Duration least);

// Collective over `control`, a group of the same ranks on CPU memory; the same report on all of them. NCCL is tried in
// a helper program per rank, as it is configured; where it fails there, once more without P2P. Without a helper on any
// rank, or where one does not do its work, all ranks try it in their own process, once: what hangs there is left
// behind.
//
// Call it before the process's first use of NCCL and, if its GPU admits one process only, of the GPU. Errors: those of
// the control group alone. On kWorksWithoutP2p the caller sets NCCL_P2P_DISABLE=1 before that first use.
absl::StatusOr<ProbeReport> ProbeNccl(ProcessGroup& control, const ProbeNcclOptions& options);

// Collective, too: what an earlier start of these ranks has left, which ProbeNccl would believe; nothing if it would
// look itself.
absl::StatusOr<std::optional<ProbeReport>> RecallProbe(ProcessGroup& control, const ProbeNcclOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_PROBE_PROBE_NCCL_H_
