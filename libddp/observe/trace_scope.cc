// SPDX-License-Identifier: Apache-2.0
#include "ddp/observer.h"
#include "ddp/process_group.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/internal_group.h"

namespace ddp {

TraceScope::TraceScope(const ProcessGroup& group, const char* name) : observer_(ObserverOf(group)) {
  if (observer_ == nullptr) return;
  event_.name = name;
  event_.begin_ns = NowNs();
  Tell(true);
}

void TraceScope::Tell(bool begin) {
  event_.begin = begin;
  if (!begin) event_.end_ns = NowNs();
  observer_->OnScope(event_);
}

}  // namespace ddp
