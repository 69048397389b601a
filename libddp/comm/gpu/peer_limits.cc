// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/peer_limits.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "libddp/base/env.h"
#include "libddp/base/size_text.h"

namespace ddp {
namespace {

constexpr uint64_t kDefaultFrom = 4 << 20;
constexpr uint64_t kLeastChunk = 4 << 10, kMostChunk = 1 << 30;

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
    const std::optional<uint64_t> size = ParseSize(sides.back());
    if (limit == nullptr || sides.size() != 2 || !size.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("DDP_PEER_COPIES is '", text, "'; it must be auto, never, or like from=4M,chunk=64M"));
    }
    *limit = *size;
  }
  if (limits.chunk < kLeastChunk || limits.chunk > kMostChunk) {
    return absl::InvalidArgumentError(absl::StrCat("DDP_PEER_COPIES is '", text, "'; a chunk has 4K to 1024M"));
  }
  limits.automatic = false;
  return limits;
}

}  // namespace ddp
