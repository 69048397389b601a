// SPDX-License-Identifier: Apache-2.0
// Chooses the rank of a host that reports a stall or a failure, so that one does and not all.
#ifndef LIBDDP_COMM_HEALTH_REPORT_ELECTION_H_
#define LIBDDP_COMM_HEALTH_REPORT_ELECTION_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ddp {

// How long a rank has been waiting in an operation, and for whom: "did not arrive: rank 1".
std::string StallText(int rank, absl::string_view operation, int64_t waited_ns, absl::string_view laggards,
                      absl::Duration timeout);

// In memory that the ranks share; all zero at first.
class alignas(64) ReportElection {
 public:
  // Whether this rank reports that it has waited so long for operation `sequence`. The lowest rank that waits does:
  // each rank gives those `before` it time to. What is in the queue behind the operation, up to `end`, waits for the
  // same and is not reported again.
  bool ClaimStall(uint64_t sequence, uint64_t end, int before, int64_t waited_ns, int64_t patience_ns);

  // Calls report(), unless another rank reports the failure; then gives it time to finish.
  void ReportFailure(absl::FunctionRef<void()> report);
  // Asks another rank to report the failure, and gives it time to.
  void AskToReport(int rank);
  bool IsAskedToReport(int rank) const {
    return reporter_.load(std::memory_order_acquire) == static_cast<uint32_t>(rank) + 1;
  }

 private:
  enum : uint32_t { kNobody, kReporting, kReported };

  void AwaitReport() const;

  std::atomic<uint64_t> stalls_;    // stalls of operations with a smaller number have been reported
  std::atomic<uint32_t> reporter_;  // the rank that is asked to report the failure, + 1
  std::atomic<uint32_t> failure_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HEALTH_REPORT_ELECTION_H_
