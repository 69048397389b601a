// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/peer_limits.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "libddp/base/env.h"

namespace ddp {
namespace {

constexpr uint64_t kDefaultFrom = 4 << 20;

}  // namespace

absl::StatusOr<PeerLimits> PeerLimits::FromEnv() {
  PeerLimits limits;
  const std::string text = ReadEnv(Env::kPeerCopies).value_or("never");
  if (text == "never") return limits;
  limits.from = kDefaultFrom;
  if (text == "auto") return limits;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> sides = absl::StrSplit(part, absl::MaxSplits('=', 1));
    uint64_t* const limit = sides[0] == "from" ? &limits.from : sides[0] == "chunk" ? &limits.chunk : nullptr;
    absl::string_view digits = sides.back();
    const int shift = absl::EndsWith(digits, "K") ? 10 : absl::EndsWith(digits, "M") ? 20 : 0;
    if (shift > 0) digits.remove_suffix(1);
    uint32_t number = 0;
    if (limit == nullptr || sides.size() != 2 || !absl::SimpleAtoi(digits, &number)) {
      return absl::InvalidArgumentError(
          absl::StrCat("DDP_PEER_COPIES is '", text, "'; it must be auto, never, or like from=4M,chunk=64M"));
    }
    *limit = static_cast<uint64_t>(number) << shift;
  }
  limits.automatic = false;
  return limits;
}

}  // namespace ddp
