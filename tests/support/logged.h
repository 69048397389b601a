// SPDX-License-Identifier: Apache-2.0
// What the library logs while a test runs.
#ifndef TESTS_SUPPORT_LOGGED_H_
#define TESTS_SUPPORT_LOGGED_H_

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "libddp/base/log.h"

namespace ddp::testing {

// Keeps warnings and errors of this process instead of printing them, while it lives, whatever DDP_LOG_LEVEL says. Make
// it where no other thread logs: before the ranks of a test start.
class Logged {
 public:
  Logged() : sink_(std::make_shared<Sink>()), others_(std::exchange(Log().sinks(), {sink_})), level_(Log().level()) {
    Log().set_level(spdlog::level::warn);
  }
  ~Logged() {
    Log().set_level(level_);
    Log().sinks() = std::move(others_);
  }
  Logged(const Logged&) = delete;
  Logged& operator=(const Logged&) = delete;

  // How many lines have all of these parts.
  int Count(const std::vector<std::string>& parts) {
    int count = 0;
    for (const std::string& line : sink_->Lines()) {
      bool all = true;
      for (const std::string& part : parts) all = all && absl::StrContains(line, part);
      count += all ? 1 : 0;
    }
    return count;
  }

 private:
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::vector<std::string> Lines() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return lines_;
    }

   protected:
    void sink_it_(const spdlog::details::log_msg& message) override {
      if (message.level >= spdlog::level::warn) lines_.emplace_back(message.payload.begin(), message.payload.end());
    }
    void flush_() override {}

   private:
    std::vector<std::string> lines_;
  };

  const std::shared_ptr<Sink> sink_;
  std::vector<spdlog::sink_ptr> others_;
  const spdlog::level::level_enum level_;
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_LOGGED_H_
