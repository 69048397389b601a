// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/probe/probe_result.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp {
namespace {

constexpr char kProbeTag[] = "probe-1";

std::string Size(size_t bytes) {
  if (bytes >= size_t{1} << 20) return absl::StrCat(bytes >> 20, " MiB");
  return bytes >= 1024 ? absl::StrCat(bytes >> 10, " KiB") : absl::StrCat(bytes, " B");
}

bool IsCollective(const ProbeStep& step) {
  return step.kind == ProbeStep::Kind::kAllReduce || step.kind == ProbeStep::Kind::kAllGather;
}

bool Possible(const ProbeResult& result) {
  if (result.state != ProbeState::kRunning && result.state != ProbeState::kPassed && !NcclFailed(result.state)) {
    return false;
  }
  if (result.state == ProbeState::kCrash || result.step < 0 || result.step >= kProbeStepCount) return false;
  for (size_t i = 0; i < kProbeSteps.size(); ++i) {
    const float us = result.micros[i];
    if (!std::isfinite(us) || us < 0) return false;
    const bool needed = result.state == ProbeState::kPassed && IsCollective(kProbeSteps[i]);
    if (needed && !kProbeSteps[i].timing_only && us == 0) return false;
  }
  return true;
}

}  // namespace

std::string StepName(int step) {
  if (step < 0 || step >= kProbeStepCount) return "";
  const ProbeStep& s = kProbeSteps[static_cast<size_t>(step)];
  switch (s.kind) {
    case ProbeStep::Kind::kLibrary:
      return "loading NCCL";
    case ProbeStep::Kind::kDevice:
      return "starting the GPU";
    case ProbeStep::Kind::kConnect:
      return "connecting the ranks";
    case ProbeStep::Kind::kAllReduce:
      return absl::StrCat("all-reduce of ", Size(s.bytes));
    case ProbeStep::Kind::kAllGather:
      return absl::StrCat("all-gather of ", Size(s.bytes));
  }
  return "";
}

void ProbeResult::set_text(absl::string_view text) {
  words = {};
  std::copy_n(text.data(), std::min(text.size(), words.size() - 1), words.data());
}

std::string EncodeProbeResult(const ProbeResult& result) {
  return absl::StrCat(kProbeTag, "\t", static_cast<int>(result.state), "\t", result.step, "\t", result.nccl_version,
                      "\t", result.nccl_result, "\t", absl::StrJoin(result.micros, ","), "\t",
                      absl::CEscape(result.words.data()));
}

std::optional<ProbeResult> DecodeProbeResult(absl::string_view line) {
  const std::vector<absl::string_view> parts = absl::StrSplit(line, '\t');
  if (parts.size() != 7 || parts[0] != kProbeTag) return std::nullopt;
  ProbeResult result;
  int state = 0;
  if (!absl::SimpleAtoi(parts[1], &state) || !absl::SimpleAtoi(parts[2], &result.step) ||
      !absl::SimpleAtoi(parts[3], &result.nccl_version) || !absl::SimpleAtoi(parts[4], &result.nccl_result)) {
    return std::nullopt;
  }
  result.state = static_cast<ProbeState>(state);
  const std::vector<absl::string_view> times = absl::StrSplit(parts[5], ',');
  if (times.size() != result.micros.size()) return std::nullopt;
  for (size_t i = 0; i < times.size(); ++i) {
    if (!absl::SimpleAtof(times[i], &result.micros[i])) return std::nullopt;
  }
  std::string text;
  if (!absl::CUnescape(parts[6], &text)) return std::nullopt;
  result.set_text(text);
  return Possible(result) ? std::optional<ProbeResult>(result) : std::nullopt;
}

}  // namespace ddp
