// SPDX-License-Identifier: Apache-2.0
// The owners of the state behind a Work.
#ifndef LIBDDP_COMM_BASE_REF_COUNTED_WORK_H_
#define LIBDDP_COMM_BASE_REF_COUNTED_WORK_H_

#include <atomic>

#include "ddp/process_group.h"

namespace ddp {

// Counts its owners, and goes with the last one.
class RefCountedWork : public internal::WorkState {
 public:
  void Ref() final { refs_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() final;

 protected:
  explicit RefCountedWork(int owners) : refs_(owners) {}
  ~RefCountedWork() override = default;

 private:
  std::atomic<int> refs_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_REF_COUNTED_WORK_H_
