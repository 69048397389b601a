#include "libddp/base/failed_ranks.h"

#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ddp/process_group.h"

namespace ddp {
namespace {

constexpr absl::string_view kPayload = "libddp/failed_ranks";

}  // namespace

absl::Status WithFailedRanks(absl::Status error, absl::Span<const int> ranks) {
  return WithPackedFailedRanks(std::move(error), absl::StrJoin(ranks, ","));
}

std::string PackFailedRanks(const absl::Status& error) {
  return std::string(error.GetPayload(kPayload).value_or(absl::Cord()));
}

absl::Status WithPackedFailedRanks(absl::Status error, absl::string_view packed) {
  if (!packed.empty()) error.SetPayload(kPayload, absl::Cord(packed));
  return error;
}

std::vector<int> FailedRanks(const absl::Status& error) {
  std::vector<int> ranks;
  for (absl::string_view text : absl::StrSplit(PackFailedRanks(error), ',', absl::SkipEmpty())) {
    int rank = 0;
    if (absl::SimpleAtoi(text, &rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace ddp
