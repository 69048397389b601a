#include "libddp/comm/base/agreement.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "libddp/comm/base/exchange.h"

namespace ddp {
namespace {

struct Block {
  uint64_t bytes = 0;
  char text[kExchangeBytes] = {};
};

}  // namespace

absl::StatusOr<std::vector<std::string>> ExchangeTexts(ProcessGroup& group, absl::string_view mine) {
  Block block;
  block.bytes = std::min(mine.size(), kExchangeBytes);
  std::memcpy(block.text, mine.data(), block.bytes);
  absl::StatusOr<std::vector<Block>> all = Exchange(group, block);
  if (!all.ok()) return all.status();
  std::vector<std::string> texts;
  for (const Block& b : *all) texts.emplace_back(b.text, b.bytes);
  return texts;
}

absl::Status AgreeOn(ProcessGroup& group, const absl::Status& mine) {
  const std::string text = mine.ok() ? "" : absl::StrCat(static_cast<int>(mine.code()), " ", mine.message());
  absl::StatusOr<std::vector<std::string>> texts = ExchangeTexts(group, text);
  if (!texts.ok()) return texts.status();
  for (const std::string& theirs : *texts) {
    const size_t space = theirs.find(' ');
    int code = 0;
    if (space == std::string::npos || !absl::SimpleAtoi(theirs.substr(0, space), &code)) continue;
    return absl::Status(static_cast<absl::StatusCode>(code), theirs.substr(space + 1));
  }
  return absl::OkStatus();
}

}  // namespace ddp
