// SPDX-License-Identifier: Apache-2.0
// What one rank has found out about NCCL, in a form that travels between processes and ranks.
#ifndef LIBDDP_COMM_PROBE_PROBE_RESULT_H_
#define LIBDDP_COMM_PROBE_PROBE_RESULT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp {

struct ProbeStep {
  enum class Kind : uint8_t { kLibrary, kDevice, kConnect, kAllReduce, kAllGather } kind = Kind::kLibrary;
  size_t bytes = 0;          // of a collective's result
  bool timing_only = false;  // done only with ProbeOptions::timing
};

// In this order. The sizes are those at which NCCL is known to fail: the smallest, those around 512 KiB, and one that
// uses all channels. The last two and 1 and 16 MiB are what backends are compared by.
inline constexpr std::array<ProbeStep, 13> kProbeSteps = {{
    {ProbeStep::Kind::kLibrary},
    {ProbeStep::Kind::kDevice},
    {ProbeStep::Kind::kConnect},
    {ProbeStep::Kind::kAllReduce, 4},
    {ProbeStep::Kind::kAllGather, 4},
    {ProbeStep::Kind::kAllReduce, size_t{512} << 10},
    {ProbeStep::Kind::kAllGather, size_t{512} << 10},
    {ProbeStep::Kind::kAllReduce, size_t{1} << 20},
    {ProbeStep::Kind::kAllGather, size_t{1} << 20},
    {ProbeStep::Kind::kAllReduce, size_t{16} << 20},
    {ProbeStep::Kind::kAllGather, size_t{16} << 20},
    {ProbeStep::Kind::kAllReduce, size_t{64} << 10, true},
    {ProbeStep::Kind::kAllReduce, size_t{64} << 20, true},
}};
inline constexpr int kProbeStepCount = static_cast<int>(kProbeSteps.size());
constexpr int FirstStepOf(ProbeStep::Kind kind) {
  int step = 0;
  while (kProbeSteps[static_cast<size_t>(step)].kind != kind) ++step;
  return step;
}

// "all-reduce of 512 KiB"; "" for a number that is no step.
std::string StepName(int step);

enum class ProbeState : int32_t {
  kRunning,
  kPassed,
  // What NCCL did.
  kWrongData,
  kCrash,  // the process died of it
  kError,
  kHang,
  // What says nothing about NCCL.
  kKilled,    // by somebody else
  kGarbled,   // the helper does not say what a helper says
  kNoHelper,  // it could not be started
  kStopped,   // because another rank had failed
};

// Whether NCCL itself has failed.
inline bool NcclFailed(ProbeState state) { return state >= ProbeState::kWrongData && state <= ProbeState::kHang; }
// Whether the helper has failed, so that nothing is known about NCCL.
inline bool HelperFailed(ProbeState state) { return state >= ProbeState::kKilled && state <= ProbeState::kNoHelper; }

// Trivially copyable.
struct ProbeResult {
  ProbeState state = ProbeState::kRunning;
  int32_t step = 0;                                   // the one that it is at, or that failed
  int32_t nccl_version = 0;                           // 0: unknown
  int32_t nccl_result = 0;                            // of a failed call
  int32_t short_ms = 0;                               // of a hang: its time, where that was short (AttemptTime); else 0
  std::array<float, kProbeSteps.size()> micros = {};  // by step, of collectives that were done; else 0
  std::array<char, 400> words = {};                   // what NCCL, CUDA or the system said

  std::string text() const { return words.data(); }
  void set_text(absl::string_view text);
  void Fail(ProbeState how, absl::string_view text) {
    state = how;
    set_text(text);
  }
};

// As one line without its end; any bytes may be in the words. Without short_ms, which the observer adds.
std::string EncodeProbeResult(const ProbeResult& result);

// Nothing if no ProbeResult is encoded so, or one that cannot be: a step that does not exist, times that are no times,
// a pass without all collectives, a state that only an observer can tell.
std::optional<ProbeResult> DecodeProbeResult(absl::string_view line);

}  // namespace ddp

#endif  // LIBDDP_COMM_PROBE_PROBE_RESULT_H_
