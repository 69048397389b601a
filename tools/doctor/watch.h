// SPDX-License-Identifier: Apache-2.0
// Ends the doctor when its time is over, whatever hangs.
#ifndef TOOLS_DOCTOR_WATCH_H_
#define TOOLS_DOCTOR_WATCH_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "tools/doctor/finding.h"

namespace doctor {

class Watch {
 public:
  // At `end`, unless destroyed before, `late` gets what has been found so far, with a finding that names what was being
  // looked at. It is called on a thread of its own, and must end the process.
  Watch(absl::Time end, absl::Duration limit, std::function<void(const Findings& findings)> late);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // What is looked at from now on: "the driver".
  void Begin(const std::string& what);
  void Found(const Findings& findings);  // in all, so far

 private:
  void Run();

  const absl::Time end_;
  const absl::Duration limit_;
  const std::function<void(const Findings& findings)> late_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::string at_ = "its start";
  Findings findings_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace doctor

#endif  // TOOLS_DOCTOR_WATCH_H_
