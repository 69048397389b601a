// SPDX-License-Identifier: Apache-2.0
// Tries NCCL out: timed collectives on data whose result is known, under a deadline.
#ifndef LIBDDP_COMM_PROBE_PROBE_H_
#define LIBDDP_COMM_PROBE_PROBE_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/types.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/comm/probe/probe_result.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

struct ProbeOptions {
  int rank = 0;
  int size = 1;
  Device device = {};
  absl::Duration limit = absl::Seconds(30);  // for everything; see TimeOfCollective
  bool timing = false;                       // also the sizes that only serve to compare speeds
  // Passes rank 0's id to all ranks: rank 0 gives it, the others get it. Called once, by another thread.
  std::function<absl::Status(nccl::UniqueId* id)> exchange_id;
  // Receives the result so far when a step begins and at the end. Called by another thread. May be empty.
  std::function<void(const ProbeResult&)> progress;
  // Asked about once a millisecond; an error from it ends the probe as kStopped.
  std::function<absl::Status()> interrupted = [] { return absl::OkStatus(); };
};

// What each collective gets, of the time for everything: to connect may take long, but what is connected answers.
absl::Duration TimeOfCollective(absl::Duration limit);

struct ProbeRun {
  ProbeResult result;
  // The communicator. To be let go once the probes of all ranks have ended: a peer may still be reading this rank's
  // memory, and what is aborted hands on what a peer takes for wrong data. Letting go takes a few seconds at most.
  std::shared_ptr<void> connection;
};

// Collective over the ranks that share the id. Never takes much longer than the limit; a thread that hangs inside NCCL
// is left behind. The communicator is nonblocking, so that its start can be aborted. `api` is an error where NCCL
// cannot be loaded. `runtime` lives for ever, and the functions of `options` own what they use.
ProbeRun RunProbe(DeviceRuntime& runtime, const absl::StatusOr<nccl::Api>& api, const ProbeOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_PROBE_PROBE_H_
