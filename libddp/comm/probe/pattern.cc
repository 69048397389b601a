// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/probe/pattern.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

// Element i of rank r is first + r * step, modulo 2^32, so that the sum over the ranks is known without a loop.
struct Element {
  uint32_t first, step;
  Element(size_t i, int pattern) {
    const uint32_t hash = (static_cast<uint32_t>(i) + 0x9e3779b9u * static_cast<uint32_t>(pattern + 1)) * 2654435761u;
    first = hash ^ (hash >> 15);
    step = (hash >> 7) | 1;
  }
  uint32_t OfRank(uint32_t rank) const { return first + rank * step; }
  uint32_t SumOver(uint32_t ranks) const { return ranks * first + step * (ranks * (ranks - 1) / 2); }
};

bool IsSum(const ProbeStep& step) { return step.kind == ProbeStep::Kind::kAllReduce; }

}  // namespace

size_t GivenElements(const ProbeStep& step, int ranks) {
  const size_t all = step.bytes / sizeof(uint32_t);
  return IsSum(step) ? all : std::max<size_t>(1, all / static_cast<size_t>(ranks));
}

size_t ResultElements(const ProbeStep& step, int ranks) {
  return GivenElements(step, ranks) * (IsSum(step) ? 1 : static_cast<size_t>(ranks));
}

size_t MostElements(int ranks, bool timing) {
  size_t most = 0;
  for (const ProbeStep& step : kProbeSteps) {
    if (!step.timing_only || timing) most = std::max(most, ResultElements(step, ranks));
  }
  return most;
}

void FillPattern(int pattern, int rank, absl::Span<uint32_t> given) {
  for (size_t i = 0; i < given.size(); ++i) given[i] = Element(i, pattern).OfRank(static_cast<uint32_t>(rank));
}

std::string CheckPattern(const ProbeStep& step, int pattern, int ranks, absl::Span<const uint32_t> result) {
  const size_t count = GivenElements(step, ranks);
  for (size_t k = 0; k < result.size(); ++k) {
    const Element element(k % count, pattern);
    const uint32_t right =
        IsSum(step) ? element.SumOver(static_cast<uint32_t>(ranks)) : element.OfRank(static_cast<uint32_t>(k / count));
    if (result[k] == right) continue;
    return absl::StrCat("element ", k, " of ", result.size(), " is ", absl::Hex(result[k]), " instead of ",
                        absl::Hex(right));
  }
  return "";
}

}  // namespace ddp
