// SPDX-License-Identifier: Apache-2.0
// Remembers from start to start what a probe has found, so that only the first one takes time.
#ifndef LIBDDP_COMM_PROBE_PROBE_CACHE_H_
#define LIBDDP_COMM_PROBE_PROBE_CACHE_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ddp/types.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/comm/probe/verdict.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// What a verdict depends on, of one rank: driver, NCCL, GPU, the host's last start (which is when firmware settings
// change), and NCCL's variables and configuration files. Empty if the GPU cannot be named. Files of the system are
// looked for under `root`.
std::string ProbeKey(DeviceRuntime& runtime, Device device, int nccl_version, absl::Span<const std::string> variables,
                     const std::string& root = "");

// DDP_PROBE_CACHE, else a folder of the user's; empty: nothing is remembered.
std::string ProbeCacheFolder();

// One file per key in a folder, readable by its user only. `key` is what all ranks' keys together are.
class ProbeCache {
 public:
  explicit ProbeCache(std::string folder) : folder_(std::move(folder)) {}

  // Nothing if there is none, if it is another user's or one that others may write, or if it is damaged.
  std::optional<ProbeReport> Load(absl::string_view key) const;
  // Replaces the entry in one step; does nothing without a folder.
  absl::Status Store(absl::string_view key, const ProbeReport& report) const;
  void Forget(absl::string_view key) const;

  std::string PathFor(absl::string_view key) const;

 private:
  const std::string folder_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_PROBE_PROBE_CACHE_H_
