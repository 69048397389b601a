// SPDX-License-Identifier: Apache-2.0
#include "tools/doctor/watch.h"

#include <chrono>
#include <utility>

#include "tools/doctor/checks.h"

namespace doctor {

Watch::Watch(absl::Time end, absl::Duration limit, std::function<void(const Findings& findings)> late)
    : end_(end), limit_(limit), late_(std::move(late)), thread_([this] { Run(); }) {}

Watch::~Watch() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Watch::Begin(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  at_ = what;
}

void Watch::Found(const Findings& findings) {
  const std::lock_guard<std::mutex> lock(mutex_);
  findings_ = findings;
}

void Watch::Run() {
  Findings findings;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_until(lock, absl::ToChronoTime(end_), [this] { return over_; })) return;
    findings = findings_;
    findings.push_back(CutOff(at_, limit_));
  }
  late_(findings);
}

}  // namespace doctor
