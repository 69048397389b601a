#include "libddp/base/env.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libddp/base/log.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

// The variables of the first column of the table in docs/environment.md.
std::vector<std::string> DocumentedNames(const std::string& text) {
  std::vector<std::string> names;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, "| `")) continue;
    names.emplace_back(std::vector<std::string>(absl::StrSplit(line, '`'))[1]);
  }
  return names;
}

TEST_CASE("the table has one row per variable, in the order of Env") {
  size_t i = 0;
  std::set<absl::string_view> names;
  for (const EnvInfo& info : EnvTable()) {
    CHECK(static_cast<size_t>(info.env) == i++);
    CHECK_FALSE(info.meaning.empty());
    CHECK(names.insert(info.name).second);
  }
  CHECK(i == static_cast<size_t>(Env::kNcclMultiRankGpu) + 1);
}

TEST_CASE("docs/environment.md documents exactly the variables of the table, with their defaults") {
  std::ifstream file(DDP_SOURCE_DIR "/docs/environment.md");
  REQUIRE(file.is_open());
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::string> names;
  for (const EnvInfo& info : EnvTable()) {
    names.emplace_back(info.name);
    const std::string shown = info.default_value.empty() ? "unset" : absl::StrCat("`", info.default_value, "`");
    const std::string row = absl::StrCat("| `", info.name, "` | ", shown, " |");
    INFO(row);
    CHECK(absl::StrContains(text, row));
  }
  CHECK(DocumentedNames(text) == names);
}

TEST_CASE("an empty variable counts as unset") {
  unsetenv("DDP_BACKEND");
  CHECK_FALSE(ReadEnv(Env::kBackend).has_value());
  setenv("DDP_BACKEND", "", 1);
  CHECK_FALSE(ReadEnv(Env::kBackend).has_value());
  setenv("DDP_BACKEND", "local", 1);
  CHECK(ReadEnv(Env::kBackend) == "local");
  unsetenv("DDP_BACKEND");
}

TEST_CASE("the log takes its level from DDP_LOG_LEVEL when it is first used") {
  setenv("DDP_LOG_LEVEL", "critical", 1);
  CHECK(Log().name() == "ddp");
  CHECK(Log().level() == spdlog::level::critical);
  setenv("DDP_LOG_LEVEL", "trace", 1);
  CHECK(Log().level() == spdlog::level::critical);
  unsetenv("DDP_LOG_LEVEL");
}

}  // namespace
}  // namespace ddp
