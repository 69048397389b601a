// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/env.h"

#include <spdlog/logger.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ddp/context.h"
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

TEST_CASE("Create rejects a value that a variable cannot have, and names the variable and the value") {
  struct Case {
    const char* variable;
    std::vector<std::string> good, bad;
  };
  const std::vector<Case> cases = {
      {"DDP_BACKEND", {"auto", "hierarchical"}, {"x", "Hierarchical", "auto "}},
      {"DDP_SHARED_MEMORY", {"auto", "memfd", "posix"}, {"x", "0", "Posix", "posix,memfd"}},
      {"DDP_SINGLE_COPY", {"auto", "off"}, {"x", "on", "0", "OFF"}},
      {"DDP_TIMEOUT", {"5", "0.5", "1e9"}, {"x", "5s", "-1", "0", "nan", "inf", "1e10", "1e999"}},
      {"DDP_STALL_WARNING", {"0", "2.5"}, {"x", "5s", "-1", "nan", "inf", "1e10"}},
      {"DDP_NODE_SIZE", {"1", "8"}, {"x", "0", "-1", "2.5", "4x", "99999999999"}},
  };
  setenv("DDP_BACKEND", "hierarchical", 1);  // reads all of them, also in a world of one
  for (const Case& c : cases) {
    for (const std::string& value : c.good) {
      CAPTURE(c.variable, value);
      setenv(c.variable, value.c_str(), 1);
      CHECK(Context::Create({}).status() == absl::OkStatus());
    }
    for (const std::string& value : c.bad) {
      CAPTURE(c.variable, value);
      setenv(c.variable, value.c_str(), 1);
      const absl::Status status = Context::Create({}).status();
      CHECK(status.code() == absl::StatusCode::kInvalidArgument);
      CAPTURE(status.ToString());
      CHECK(absl::StrContains(status.message(), c.variable));
      CHECK(absl::StrContains(status.message(), value));
    }
    unsetenv(c.variable);
    setenv("DDP_BACKEND", "hierarchical", 1);
  }
  unsetenv("DDP_BACKEND");
}

}  // namespace
}  // namespace ddp
