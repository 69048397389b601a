// SPDX-License-Identifier: Apache-2.0
// Why a group has failed, where all its ranks can read it. The first cause is everybody's.
#ifndef LIBDDP_COMM_HEALTH_SHARED_FAILURE_H_
#define LIBDDP_COMM_HEALTH_SHARED_FAILURE_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "libddp/base/failed_ranks.h"

namespace ddp {

// Lies in shared memory; all zero means that the group has not failed. Thread-safe.
class alignas(64) SharedFailure {
 public:
  // Whether a rank has failed, even if it has not yet said why.
  bool happened() const { return state_.load() != kNone; }

  // Makes `why` the group's cause of failure, by the word of `rank`, unless there is one already; returns the one that
  // counts. A rank that is still writing its own down is waited for: with more ranks than processors it may have lost
  // its processor just then. If it takes longer than a second it is dead or stopped, and the answer says so.
  absl::Status Record(const absl::Status& why, int rank);

  // The two halves of Record. Who is the first to claim, and nobody else, has to write.
  bool Claim(int rank);
  void Write(const absl::Status& why);

  // The cause, once it has been written down; OK until then.
  absl::Status cause() const;

 private:
  // From kWriting on: kWriting + the rank that has claimed.
  enum : uint32_t { kNone, kWritten, kWriting };

  std::atomic<uint32_t> state_;
  PackedError cause_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HEALTH_SHARED_FAILURE_H_
