// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/ref_counted_work.h"

namespace ddp {

// Apart from the class, or static analysis takes every owner for the last one.
void RefCountedWork::Unref() {
  // The last owner need not count down.
  if (refs_.load(std::memory_order_acquire) == 1 || refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

}  // namespace ddp
