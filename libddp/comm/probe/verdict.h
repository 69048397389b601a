// SPDX-License-Identifier: Apache-2.0
// What all ranks' probes together say about NCCL.
#ifndef LIBDDP_COMM_PROBE_VERDICT_H_
#define LIBDDP_COMM_PROBE_VERDICT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "libddp/comm/probe/probe_result.h"

namespace ddp {

enum class ProbeVerdict {
  kWorks,            // as it is configured
  kWorksWithoutP2p,  // with NCCL_P2P_DISABLE=1, and not without
  kInconclusive,     // it does not work, and that P2P is the reason has not been shown
  kBroken,           // it does not work, with or without P2P
};

struct ProbeReport {
  ProbeVerdict verdict = ProbeVerdict::kBroken;
  // Of the failure, if there is one; the rank may be -1: of no single one. How it failed: "hung", "moved wrong data
  // (...)". A cause may be unknown.
  int failed_rank = -1;
  std::string failed_step, how, cause, remedy;
  std::string warning;  // NCCL works, but slowly
  // The slowest rank's times, by step, as configured and without P2P; 0: not done.
  decltype(ProbeResult::micros) micros = {}, micros_without_p2p = {};
  // The same of the hierarchical backend, where it was compared.
  decltype(ProbeResult::micros) micros_hierarchical = {};
  std::string note;      // how it was found out, where that was not the usual way
  bool hurried = false;  // it rests on a hang in a short time (AttemptTime): not to be remembered
  bool from_cache = false;
  std::string key;  // by which a ProbeCache remembers it; empty: none does
};

// "hung", "moved wrong data (...)", "hung (it had 2.5s only)".
std::string HowItFailed(const ProbeResult& result);

// The slowest rank's times.
decltype(ProbeResult::micros) Slowest(absl::Span<const ProbeResult> results);

// One line for the log.
std::string Describe(const ProbeReport& report);

// What gives an attempt more time.
inline constexpr char kMoreTime[] = "raise DDP_TIMEOUT";

// The verdict of results in rank order; the same on all ranks. `without_p2p` is empty if that was not tried,
// `p2p_disabled` says that it is so configured, and `more_time` is the remedy for a time that was too short. A function
// of its arguments.
ProbeReport Judge(absl::Span<const ProbeResult> configured, absl::Span<const ProbeResult> without_p2p,
                  bool p2p_disabled, absl::string_view more_time = kMoreTime);

// Whether to try NCCL without P2P after these results.
bool WorthTryingWithoutP2p(absl::Span<const ProbeResult> configured, bool p2p_disabled);

// The rank whose result tells most about what went wrong; -1 if all have passed.
int FirstFailure(absl::Span<const ProbeResult> results);

// The geometric mean, in microseconds, of the all-reduces by which backends are compared (64 KiB, 1, 16 and 64 MiB); 0
// if one is missing.
double ComparisonTime(const decltype(ProbeResult::micros)& micros);

}  // namespace ddp

#endif  // LIBDDP_COMM_PROBE_VERDICT_H_
