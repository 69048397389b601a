// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/graph_watch.h"

#include <atomic>
#include <memory>
#include <utility>

#include "libddp/base/owner_process.h"

namespace ddp {

absl::Status GraphWatch::TakeTurns() {
  for (OwnedEvent* const event : {&others_, &replays_}) {
    absl::StatusOr<OwnedEvent> made = MakeEvent(runtime_);
    if (!made.ok()) return made.status();
    *event = *std::move(made);
  }
  return absl::OkStatus();
}

void GraphWatch::Forsake() {
  if (!any_captured_) return;
  KeepForever(std::make_shared<std::pair<OwnedEvent, OwnedEvent>>(std::move(others_), std::move(replays_)));
}

// The first captured operation finds the stream outside of the capture. Before the first replay there is none to wait
// for.
absl::Status GraphWatch::Enter(void* stream, bool captured) {
  if (!takes_turns()) return absl::OkStatus();
  if (!captured) return any_captured_ ? runtime_.WaitEvent(stream, replays_.get()) : absl::OkStatus();
  if (any_captured_) return absl::OkStatus();
  any_captured_ = true;
  absl::Status status = runtime_.Record(others_.get(), stream);
  return status.ok() ? runtime_.Record(replays_.get(), stream) : status;
}

absl::Status GraphWatch::Leave(void* stream) {
  return any_captured_ ? runtime_.Record(others_.get(), stream) : absl::OkStatus();
}

absl::Status GraphWatch::Begin(void* stream) {
  const absl::StatusOr<uint64_t> capture = runtime_.CaptureOf(stream);
  if (!capture.ok()) return capture.status();
  if (open_in_ == *capture) return absl::OkStatus();
  open_in_ = *capture;
  absl::Status status;
  if (takes_turns()) {
    status = runtime_.WaitEachReplay(stream, others_.get());
    if (status.ok()) status = runtime_.WaitEachReplay(stream, replays_.get());  // of other graphs, on other streams
  }
  if (status.ok()) status = runtime_.Increment(counters_, stream);
  return status;
}

absl::StatusOr<bool> GraphWatch::End(void* stream) {
  const absl::StatusOr<uint64_t> capture = runtime_.CaptureOf(stream);
  if (!capture.ok()) return capture.status();
  if (open_in_ == 0 || open_in_ != *capture) return false;
  open_in_ = 0;
  absl::Status status = takes_turns() ? runtime_.RecordEachReplay(replays_.get(), stream) : absl::OkStatus();
  if (status.ok()) status = runtime_.Increment(counters_ + 1, stream);
  if (!status.ok()) return status;
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
