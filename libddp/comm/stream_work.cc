// SPDX-License-Identifier: Apache-2.0
// Work of the program's own on a GPU's stream.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/comm_hook.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/ref_counted_work.h"
#include "libddp/device/device_runtime.h"

namespace ddp {
namespace {

class StreamWorkState final : public RefCountedWork {
 public:
  StreamWorkState(const ProcessGroup& group, OwnedEvent event)
      : RefCountedWork(1), group_(group), event_(std::move(event)) {}

  // What a group leaves behind that has failed may never come free: whoever waits is told.
  bool Done() const override { return !group_.status().ok() || Passed().value_or(true); }
  absl::Status Wait(absl::Time deadline) override {
    const absl::Time limit = std::min(deadline, absl::Now() + group_.timeout());
    const absl::Status waited = WaitForEvent(event_, [&] { return !group_.status().ok() || absl::Now() >= limit; });
    if (absl::Status s = group_.status(); !s.ok()) return s;
    if (!absl::IsDeadlineExceeded(waited)) return Named(waited);
    if (limit == deadline) return Named(absl::DeadlineExceededError("the stream's work is not done yet; it goes on"));
    return Named(absl::DeadlineExceededError(
        absl::StrCat("the stream's work is not done after ", absl::FormatDuration(group_.timeout()),
                     "; a kernel on it, or before it, is stuck or slow (DDP_TIMEOUT sets the limit in seconds)")));
  }
  absl::Status BlockStream(Stream stream) override {
    if (!IsGpu(stream.device)) return Wait(absl::InfiniteFuture());
    if (absl::Status s = group_.status(); !s.ok()) return s;
    const DeviceGuard guard(Devices(), stream.device);
    return Named(guard.status().ok() ? Devices().WaitEvent(stream.native, event_.get()) : guard.status());
  }

 private:
  absl::StatusOr<bool> Passed() const {
    const DeviceGuard guard(Devices(), event_.device());
    if (!guard.status().ok()) return guard.status();
    return Devices().Finished(event_.get());
  }
  absl::Status Named(const absl::Status& error) const { return NameRank(group_, "StreamWork", error); }

  const ProcessGroup& group_;
  const OwnedEvent event_;
};

}  // namespace

Work StreamWork(ProcessGroup& group, Stream stream) {
  if (!IsGpu(stream.device)) {
    return NameRank(group, "StreamWork", absl::InvalidArgumentError("no stream of a GPU given"));
  }
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok()) return NameRank(group, "StreamWork", guard.status());
  absl::StatusOr<OwnedEvent> event = MakeEvent(Devices());
  if (!event.ok()) return NameRank(group, "StreamWork", event.status());
  if (absl::Status s = Devices().Record(event->get(), stream.native); !s.ok()) {
    return NameRank(group, "StreamWork", s);
  }
  return Work(new StreamWorkState(group, *std::move(event)));
}

}  // namespace ddp
