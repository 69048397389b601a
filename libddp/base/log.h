// SPDX-License-Identifier: Apache-2.0
// The library's log: a spdlog logger of its own, named "ddp", on standard error. Level by DDP_LOG_LEVEL, default
// "warn". Only log.cc includes spdlog: what formats is long, and would be compiled again in every file that logs.
#ifndef LIBDDP_BASE_LOG_H_
#define LIBDDP_BASE_LOG_H_

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace spdlog {
class logger;
}

namespace ddp {

enum class LogLevel { kDebug = 1, kInfo, kWarn, kError };  // as spdlog numbers them

// Whether lines of this level are printed.
bool LogsAt(LogLevel level);
void WriteLog(LogLevel level, absl::string_view line);

// A line of these parts, as absl::StrCat joins them. They are joined only if the line is printed.
template <typename... Parts>
void LogAt(LogLevel level, const Parts&... parts) {
  if (LogsAt(level)) WriteLog(level, absl::StrCat(parts...));
}
template <typename... Parts>
void LogDebug(const Parts&... parts) {
  LogAt(LogLevel::kDebug, parts...);
}
template <typename... Parts>
void LogInfo(const Parts&... parts) {
  LogAt(LogLevel::kInfo, parts...);
}
template <typename... Parts>
void LogWarn(const Parts&... parts) {
  LogAt(LogLevel::kWarn, parts...);
}
template <typename... Parts>
void LogError(const Parts&... parts) {
  LogAt(LogLevel::kError, parts...);
}

// Created on first use. A program that registered a spdlog logger called "ddp" before gets its own used instead.
spdlog::logger& Log();

}  // namespace ddp

#endif  // LIBDDP_BASE_LOG_H_
