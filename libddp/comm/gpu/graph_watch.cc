// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/graph_watch.h"

#include <atomic>

namespace ddp {

absl::Status GraphWatch::Begin(void* stream) {
  if (open_) return absl::OkStatus();
  open_ = true;
  return runtime_.Increment(counters_, stream);
}

absl::StatusOr<bool> GraphWatch::End(void* stream) {
  if (!open_) return false;
  open_ = false;
  if (absl::Status s = runtime_.Increment(counters_ + 1, stream); !s.ok()) return s;
  return true;
}

uint32_t GraphWatch::Read(int counter) const {
  return std::atomic_ref<uint32_t>(counters_[counter]).load(std::memory_order_acquire);
}

int64_t GraphWatch::RunningNs(int64_t now_ns) {
  const uint32_t ended = Read(1), begun = Read(0);
  if (static_cast<int32_t>(begun - ended) <= 0) return since_ns_ = 0;
  if (since_ns_ == 0 || begun != seen_) since_ns_ = now_ns;
  seen_ = begun;
  return now_ns - since_ns_;
}

}  // namespace ddp
