// SPDX-License-Identifier: Apache-2.0
// Data for trying collectives out: what comes out is known.
#ifndef LIBDDP_COMM_PROBE_PATTERN_H_
#define LIBDDP_COMM_PROBE_PATTERN_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "libddp/comm/probe/probe_result.h"

namespace ddp {

// So that what an earlier operation left in memory is not taken for a result.
inline constexpr int kPatterns = 2;

// How often a collective that has moved the data right is timed; the fastest counts.
inline constexpr int kTimedRuns = 3;

// The elements, of 4 bytes, that each rank gives to a step's collective, and those of its result.
size_t GivenElements(const ProbeStep& step, int ranks);
size_t ResultElements(const ProbeStep& step, int ranks);

// Of all steps, those that serve to compare speeds only with `timing`.
size_t MostElements(int ranks, bool timing);

// What `rank` gives.
void FillPattern(int pattern, int rank, absl::Span<uint32_t> given);

// What is wrong with a result; empty if nothing is.
std::string CheckPattern(const ProbeStep& step, int pattern, int ranks, absl::Span<const uint32_t> result);

}  // namespace ddp

#endif  // LIBDDP_COMM_PROBE_PATTERN_H_
