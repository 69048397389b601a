// SPDX-License-Identifier: Apache-2.0
// The launch variables, as lines NAME=value: whatever they say, either a place in the world that makes sense, or one
// line that tells what is wrong with them.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "libddp/base/env.h"
#include "libddp/launch/launch_info.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::map<std::string, std::string, std::less<>> variables;
  for (const absl::string_view line :
       absl::StrSplit(absl::string_view(reinterpret_cast<const char*>(data), size), '\n')) {
    const size_t equals = line.find('=');
    if (equals != absl::string_view::npos)
      variables[std::string(line.substr(0, equals))] = std::string(line.substr(equals + 1));
  }
  const auto lookup = [&](ddp::Env env) -> std::optional<std::string> {
    const auto found = variables.find(ddp::EnvName(env));
    if (found == variables.end() || found->second.empty()) return std::nullopt;
    return found->second;
  };
  const absl::StatusOr<ddp::LaunchInfo> info = ddp::DetectLaunch({}, lookup);
  if (info.ok()) {
    Require(info->rank >= 0 && info->rank < info->world_size);
    Require(info->local_rank >= 0 && info->local_rank < info->local_world_size);
    Require(info->local_world_size <= info->world_size);
    Require(!info->launcher.empty());
  } else {
    Require(absl::IsInvalidArgument(info.status()));
    Require(!info.status().message().empty() && info.status().message().find('\n') == absl::string_view::npos);
  }
  return 0;
}
