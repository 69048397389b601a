// The doctor's rules: what follows from the facts.
#ifndef TOOLS_DOCTOR_CHECKS_H_
#define TOOLS_DOCTOR_CHECKS_H_

#include <vector>

#include "libddp/comm/probe/verdict.h"
#include "tools/doctor/facts.h"
#include "tools/doctor/finding.h"

namespace doctor {

// Of one rank. A function of the facts.
Findings Check(const Facts& facts);

// What the probe of NCCL has found, and what the library will therefore do.
Finding CheckProbe(const ddp::ProbeReport& report);

// Whether each rank sees a GPU, in rank order: where some do and some do not, nothing can be tried out.
Findings CheckGpusOfRanks(const std::vector<bool>& sees_gpu);

// The findings of all ranks in one list, the worst first; what several say stands once, with their numbers.
Findings Merge(const std::vector<Findings>& by_rank);

}  // namespace doctor

#endif  // TOOLS_DOCTOR_CHECKS_H_
