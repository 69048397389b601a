// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/log.h"

#include <spdlog/common.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/null_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>

#include "libddp/base/env.h"

namespace ddp {
namespace {

// spdlog answers `off` for a name it does not know, and its spelling of warn is "warning".
bool ParseLevel(const std::string& name, spdlog::level::level_enum& level) {
  level = spdlog::level::from_str(name);
  return level != spdlog::level::off || name == "off";
}

std::shared_ptr<spdlog::logger> MakeLogger() {
  try {
    if (auto theirs = spdlog::get("ddp")) return theirs;
    auto logger = std::make_shared<spdlog::logger>("ddp", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    logger->set_pattern("%H:%M:%S.%e %P ddp %^%l%$: %v");
    const std::string name = ReadEnv(Env::kLogLevel).value_or("warn");
    spdlog::level::level_enum level;
    const bool known = ParseLevel(name, level);
    logger->set_level(known ? level : spdlog::level::warn);
    if (!known) {
      logger->warn("DDP_LOG_LEVEL={} is unknown, using warn; say trace, debug, info, warn, error, critical or off",
                   name);
    }
    return logger;
  } catch (...) {
    // A log that cannot be had is no reason for the program to fail.
    return std::make_shared<spdlog::logger>("ddp", std::make_shared<spdlog::sinks::null_sink_mt>());
  }
}

constexpr spdlog::level::level_enum LevelOf(LogLevel level) { return static_cast<spdlog::level::level_enum>(level); }
static_assert(LevelOf(LogLevel::kDebug) == spdlog::level::debug && LevelOf(LogLevel::kInfo) == spdlog::level::info &&
              LevelOf(LogLevel::kWarn) == spdlog::level::warn && LevelOf(LogLevel::kError) == spdlog::level::err);

}  // namespace

bool LogsAt(LogLevel level) { return Log().should_log(LevelOf(level)); }

void WriteLog(LogLevel level, absl::string_view line) {
  Log().log(LevelOf(level), spdlog::string_view_t(line.data(), line.size()));
}

spdlog::logger& Log() {
  // Never destroyed: destructors of static objects may still log.
  static const auto* const logger = new std::shared_ptr<spdlog::logger>(MakeLogger());
  return **logger;
}

}  // namespace ddp
