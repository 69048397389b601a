#include "libddp/base/failed_ranks.h"

#include <algorithm>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ddp/process_group.h"

namespace ddp {
namespace {

constexpr absl::string_view kPayload = "libddp/failed_ranks";

// Into an array of characters, cut off before the last separator that fits.
void CopyText(absl::string_view text, absl::string_view separator, absl::Span<char> to) {
  if (text.size() >= to.size()) {
    const size_t end = separator.empty() ? absl::string_view::npos : text.rfind(separator, to.size() - 1);
    text = text.substr(0, std::min(end, to.size() - 1));
  }
  std::copy(text.begin(), text.end(), to.begin());
  to[text.size()] = 0;
}

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

void PackedError::Pack(const absl::Status& error) {
  code = static_cast<int32_t>(error.code());
  CopyText(PackFailedRanks(error), ",", absl::MakeSpan(failed_ranks));
  CopyText(error.message(), "", absl::MakeSpan(message));
}

absl::Status PackedError::Unpack() const {
  return WithPackedFailedRanks(absl::Status(static_cast<absl::StatusCode>(code), message), failed_ranks);
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
