// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/probe/verdict.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "libddp/comm/nccl/advice.h"

namespace ddp {
namespace {

using StepKind = ProbeStep::Kind;

constexpr size_t kSlowBytes = size_t{16} << 20;
constexpr double kSlowGbPerSecond = 1;  // a tenth of what host memory gives two GPUs on old PCIe

StepKind KindOf(const ProbeResult& r) { return kProbeSteps[static_cast<size_t>(r.step)].kind; }

// What tells most comes first: a rank often fails, or hangs, because another one has.
int Weight(const ProbeResult& r) {
  switch (r.state) {
    case ProbeState::kWrongData:
      return 0;
    case ProbeState::kCrash:
      return 1;
    case ProbeState::kError:
      return r.nccl_result == nccl::kRemoteError ? 4 : 2;
    case ProbeState::kKilled:
    case ProbeState::kGarbled:
    case ProbeState::kNoHelper:
      return 3;
    case ProbeState::kHang:
      return 5;
    case ProbeState::kStopped:
    case ProbeState::kRunning:
      return 6;
    case ProbeState::kPassed:
      return 7;
  }
  return 7;
}

// Small operations work, those that use more memory fail: faults of several versions of NCCL.
bool FailsFrom512KiB(const ProbeResult& r) {
  const ProbeStep& step = kProbeSteps[static_cast<size_t>(r.step)];
  return (r.state == ProbeState::kCrash || r.state == ProbeState::kError) && step.kind >= StepKind::kAllReduce &&
         step.bytes == size_t{512} << 10;
}

nccl::CauseAndRemedy Diagnose(const ProbeResult& r, ProbeVerdict verdict) {
  if (nccl::CauseAndRemedy known = nccl::Recognise(r.text(), static_cast<nccl::Result>(r.nccl_result), r.nccl_version);
      !known.cause.empty()) {
    return known;
  }
  if (verdict == ProbeVerdict::kWorksWithoutP2p) {
    return {
        "the GPUs cannot use each other's memory: PCIe ACS or an IOMMU stands between them, or the driver does not "
        "support it for these GPUs",
        "set NCCL_P2P_DISABLE=1, which costs some speed; for direct transfers turn ACS and the IOMMU off in the "
        "firmware, "
        "or update the driver (ddp_doctor looks at them)"};
  }
  if (FailsFrom512KiB(r)) {
    return {"some versions of NCCL fail from 512 KiB on with some GPUs", "use a newer NCCL (DDP_NCCL_LIBRARY)"};
  }
  if (KindOf(r) == StepKind::kLibrary || KindOf(r) == StepKind::kDevice) return {"", ""};  // its words say both
  if (r.state == ProbeState::kHang) {
    return {"ranks cannot reach each other by TCP, or one of the GPUs is stuck",
            "look at NCCL_SOCKET_IFNAME and the firewall; NCCL_DEBUG=INFO says how far NCCL came"};
  }
  if (r.state == ProbeState::kWrongData) {
    return {"a GPU, its memory or its driver is faulty", "look for Xid errors in dmesg; update the driver"};
  }
  return {"", "NCCL_DEBUG=INFO in the environment says more; ddp_doctor looks for known causes"};
}

// A hang may be nothing but a slow start.
void AddWantOfTime(absl::string_view more_time, nccl::CauseAndRemedy* known) {
  known->cause = absl::StrCat("the time was too short", known->cause.empty() ? "" : ", or ", known->cause);
  known->remedy = absl::StrCat(more_time, known->remedy.empty() ? "" : "; ", known->remedy);
}

std::string SlowWarning(const decltype(ProbeResult::micros)& micros) {
  for (size_t i = 0; i < kProbeSteps.size(); ++i) {
    if (kProbeSteps[i].kind != StepKind::kAllReduce || kProbeSteps[i].bytes != kSlowBytes || micros[i] == 0) continue;
    const double rate = static_cast<double>(kSlowBytes) / static_cast<double>(micros[i]) / 1e3;
    if (rate >= kSlowGbPerSecond) return "";
    return absl::StrFormat(
        "NCCL works, but its %s took %.1f ms (%.2f GB/s): look at the GPUs' PCIe width, at the binding of the ranks "
        "and at NCCL's variables (ddp_doctor does)",
        StepName(static_cast<int>(i)), static_cast<double>(micros[i]) / 1e3, rate);
  }
  return "";
}

}  // namespace

std::string HowItFailed(const ProbeResult& r) {
  const std::string words = r.text();
  const std::string in_brackets = words.empty() ? "" : absl::StrCat(" (", words, ")");
  switch (r.state) {
    case ProbeState::kWrongData:
      return absl::StrCat("moved wrong data", in_brackets);
    case ProbeState::kCrash:
      return absl::StrCat("crashed", in_brackets);
    case ProbeState::kError:
      return absl::StrCat("failed", in_brackets);
    case ProbeState::kHang:
      if (r.short_ms == 0) return absl::StrCat("hung", in_brackets);
      // In tenths of a second.
      return absl::StrCat("hung (it had ", absl::FormatDuration(absl::Milliseconds((r.short_ms + 99) / 100 * 100)),
                          " only", words.empty() ? "" : ": ", words, ")");
    case ProbeState::kStopped:
      return "was stopped because another rank had failed";
    default:
      return absl::StrCat("could not be checked", in_brackets);
  }
}

decltype(ProbeResult::micros) Slowest(absl::Span<const ProbeResult> results) {
  decltype(ProbeResult::micros) micros = {};
  for (const ProbeResult& r : results) {
    for (size_t i = 0; i < micros.size(); ++i) micros[i] = std::max(micros[i], r.micros[i]);
  }
  return micros;
}

int FirstFailure(absl::Span<const ProbeResult> results) {
  int first = -1;
  for (int r = 0; r < static_cast<int>(results.size()); ++r) {
    const ProbeResult& mine = results[static_cast<size_t>(r)];
    if (mine.state == ProbeState::kPassed) continue;
    if (first < 0) {
      first = r;
      continue;
    }
    const ProbeResult& best = results[static_cast<size_t>(first)];
    if (std::pair(Weight(mine), mine.step) < std::pair(Weight(best), best.step)) first = r;
  }
  return first;
}

bool WorthTryingWithoutP2p(absl::Span<const ProbeResult> configured, bool p2p_disabled) {
  const int failed = FirstFailure(configured);
  if (failed < 0 || p2p_disabled) return false;
  const ProbeResult& r = configured[static_cast<size_t>(failed)];
  return NcclFailed(r.state) && KindOf(r) != StepKind::kLibrary && KindOf(r) != StepKind::kDevice;
}

ProbeReport Judge(absl::Span<const ProbeResult> configured, absl::Span<const ProbeResult> without_p2p,
                  bool p2p_disabled, absl::string_view more_time) {
  ProbeReport report;
  report.micros = Slowest(configured);
  report.micros_without_p2p = Slowest(without_p2p);
  const int failed = FirstFailure(configured);
  if (failed < 0) {
    report.verdict = ProbeVerdict::kWorks;
    report.warning = SlowWarning(report.micros);
    return report;
  }
  const ProbeResult& r = configured[static_cast<size_t>(failed)];
  const bool early = KindOf(r) == StepKind::kLibrary || KindOf(r) == StepKind::kDevice;
  if (!without_p2p.empty() && FirstFailure(without_p2p) < 0) {
    report.verdict = ProbeVerdict::kWorksWithoutP2p;
    report.warning = SlowWarning(report.micros_without_p2p);
  } else if (NcclFailed(r.state) && (early || p2p_disabled)) {
    report.verdict = ProbeVerdict::kBroken;
  } else {
    report.verdict = ProbeVerdict::kInconclusive;
  }
  report.failed_rank = failed;
  report.failed_step = StepName(r.step);
  report.how = HowItFailed(r);
  if (const int again = FirstFailure(without_p2p); again >= 0) {
    const ProbeResult& second = without_p2p[static_cast<size_t>(again)];
    absl::StrAppend(&report.how, ", and without P2P on rank ", again, " ", StepName(second.step), " ",
                    HowItFailed(second));
  }
  nccl::CauseAndRemedy known = Diagnose(r, report.verdict);
  report.hurried = r.short_ms > 0;
  if (report.hurried) AddWantOfTime(more_time, &known);
  report.cause = known.cause;
  report.remedy = known.remedy;
  return report;
}

double ComparisonTime(const decltype(ProbeResult::micros)& micros) {
  double sum = 0;
  int count = 0;
  for (size_t i = 0; i < kProbeSteps.size(); ++i) {
    const size_t kib = kProbeSteps[i].bytes >> 10;
    if (kProbeSteps[i].kind != StepKind::kAllReduce || (kib != 64 && kib != 1024 && kib != 16384 && kib != 65536))
      continue;
    if (micros[i] <= 0) return 0;
    sum += std::log(static_cast<double>(micros[i]));
    ++count;
  }
  return std::exp(sum / count);
}

std::string Describe(const ProbeReport& report) {
  std::string text;
  switch (report.verdict) {
    case ProbeVerdict::kWorks:
      text = "NCCL works";
      break;
    case ProbeVerdict::kWorksWithoutP2p:
      text = "NCCL works without P2P (NCCL_P2P_DISABLE=1) only";
      break;
    case ProbeVerdict::kInconclusive:
      text = "NCCL does not work, and that P2P is the reason has not been shown";
      break;
    case ProbeVerdict::kBroken:
      text = "NCCL does not work";
      break;
  }
  if (!report.how.empty()) {
    const std::string rank = report.failed_rank < 0 ? "" : absl::StrCat("on rank ", report.failed_rank, " ");
    absl::StrAppend(&text, ": ", rank, report.failed_step, " ", report.how);
  }
  if (!report.cause.empty()) absl::StrAppend(&text, "; likely cause: ", report.cause);
  if (!report.remedy.empty()) absl::StrAppend(&text, "; remedy: ", report.remedy);
  if (!report.warning.empty()) absl::StrAppend(&text, "; ", report.warning);
  if (!report.note.empty()) absl::StrAppend(&text, " (", report.note, ")");
  if (report.from_cache) absl::StrAppend(&text, " (found at an earlier start; DDP_FRESH_PROBE=1 looks again)");
  return text;
}

}  // namespace ddp
