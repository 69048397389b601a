#include "libddp/reducer/exchange.h"

#include <algorithm>

namespace ddp {

absl::StatusOr<std::vector<std::string>> GatherText(ProcessGroup& group, absl::string_view mine) {
  const size_t size = static_cast<size_t>(group.size());
  uint64_t length = mine.size();
  std::vector<uint64_t> lengths(size);
  if (absl::Status s = Finish(StartGather<uint64_t>(group, {&length, 1}, absl::MakeSpan(lengths))); !s.ok()) return s;
  const size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> texts(size);
  if (longest == 0) return texts;
  std::string padded(mine);
  padded.resize(longest);
  std::vector<char> all(longest * size);
  if (absl::Status s = Finish(StartGather<char>(group, absl::MakeSpan(&padded[0], longest), absl::MakeSpan(all)));
      !s.ok()) {
    return s;
  }
  for (size_t r = 0; r < size; ++r) texts[r].assign(all.data() + r * longest, lengths[r]);
  return texts;
}

}  // namespace ddp
