// SPDX-License-Identifier: Apache-2.0
// The doctor's rules: what follows from the facts.
#ifndef TOOLS_DOCTOR_CHECKS_H_
#define TOOLS_DOCTOR_CHECKS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "libddp/comm/probe/verdict.h"
#include "tools/doctor/copies.h"
#include "tools/doctor/facts.h"
#include "tools/doctor/finding.h"

namespace doctor {

// Of one rank. A function of the facts.
Findings Check(const Facts& facts);

// What the probe of NCCL has found.
Finding CheckProbe(const ddp::ProbeReport& report);

// What auto would choose, with regard to the program's environment.
struct AutoFacts {
  std::string backend;      // DDP_BACKEND; empty: unset
  bool fresh = false;       // DDP_FRESH_PROBE=1
  bool remembers = true;    // results of probes are remembered
  std::string choice = {};  // what this machine's GPUs allow: "nccl"; empty: nothing works
  std::string why;          // BackendChoice::text
  ddp::ProbeVerdict verdict = ddp::ProbeVerdict::kWorks;
  std::optional<ddp::ProbeReport> remembered = {};  // of an earlier start
};
Findings CheckChoice(const AutoFacts& facts);

// What became of copies between GPUs.
Findings CheckCopies(const CopyReport& report);

// Of something that was not done within `limit`, which is the time for everything.
Finding CutOff(const std::string& what, absl::Duration limit);

// What gives the doctor more time, as a command.
std::string MoreTime(absl::Duration limit);

// Whether each rank sees a GPU, in rank order: where some do and some do not, nothing can be tried out.
Findings CheckGpusOfRanks(const std::vector<bool>& sees_gpu);

// The findings of all ranks in one list, the worst first; what several say stands once, with their numbers.
Findings Merge(const std::vector<Findings>& by_rank);

}  // namespace doctor

#endif  // TOOLS_DOCTOR_CHECKS_H_
