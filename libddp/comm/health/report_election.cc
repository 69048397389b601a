// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/health/report_election.h"

#include <time.h>

#include "absl/strings/str_format.h"
#include "libddp/base/spin.h"

namespace ddp {
namespace {

// How long a rank waits for another's report.
constexpr int64_t kReportNs = 100'000'000;

}  // namespace

std::string StallText(int rank, absl::string_view operation, int64_t waited_ns, absl::string_view laggards,
                      absl::Duration timeout) {
  return absl::StrFormat("rank %d: %s, has been waiting for %.1f s: %s; it goes on waiting up to the time-out of %s",
                         rank, operation, static_cast<double>(waited_ns) / 1e9, laggards,
                         absl::FormatDuration(timeout));
}

bool ReportElection::ClaimStall(uint64_t sequence, uint64_t end, int before, int64_t waited_ns, int64_t patience_ns) {
  if (waited_ns - before * kReportNs < patience_ns) return false;
  uint64_t reported = stalls_.load(std::memory_order_relaxed);
  return reported <= sequence && stalls_.compare_exchange_strong(reported, end);
}

void ReportElection::ReportFailure(absl::FunctionRef<void()> report) {
  uint32_t nobody = kNobody;
  if (!failure_.compare_exchange_strong(nobody, kReporting)) return AwaitReport();
  report();
  failure_.store(kReported, std::memory_order_release);
}

void ReportElection::AskToReport(int rank) {
  reporter_.store(static_cast<uint32_t>(rank) + 1, std::memory_order_release);
  AwaitReport();
}

void ReportElection::AwaitReport() const {
  const int64_t until = NowNs() + kReportNs;
  while (failure_.load(std::memory_order_acquire) != kReported && NowNs() < until) {
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
  }
}

}  // namespace ddp
