// SPDX-License-Identifier: Apache-2.0
// What the operations and messages of all groups on CPU memory have in common as the state behind a Work.
#ifndef LIBDDP_COMM_BASE_COUNTED_WORK_H_
#define LIBDDP_COMM_BASE_COUNTED_WORK_H_

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "libddp/comm/base/ref_counted_work.h"

namespace ddp {

// It has two owners at first: who does the work, and the Work that is returned to the caller.
class CountedWork : public RefCountedWork {
 public:
  bool Done() const final { return done_.load(std::memory_order_acquire); }
  absl::Status BlockStream(Stream) final { return Wait(absl::InfiniteFuture()); }
  int64_t EndedNs() const final { return ended_ns_; }

  // Sets the outcome, once, and when the work ended, if that is known; from here on the buffers are the caller's again.
  void Finish(absl::Status status, int64_t ended_ns = 0) {
    status_ = std::move(status);
    ended_ns_ = ended_ns;
    done_.store(true, std::memory_order_release);
  }
  // The outcome, where it is done.
  const absl::Status& status() const { return status_; }

 protected:
  CountedWork() : RefCountedWork(2) {}
  ~CountedWork() override = default;

 private:
  std::atomic<bool> done_{false};
  absl::Status status_;
  int64_t ended_ns_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_COUNTED_WORK_H_
