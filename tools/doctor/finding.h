// SPDX-License-Identifier: Apache-2.0
// What ddp_doctor has to say about one thing.
#ifndef TOOLS_DOCTOR_FINDING_H_
#define TOOLS_DOCTOR_FINDING_H_

#include <string>
#include <vector>

namespace doctor {

enum class Severity { kOk, kNote, kWarning, kError };

struct Finding {
  Severity severity = Severity::kOk;
  std::string check;   // a word for programs that read the report: "pcie_width"
  std::string text;    // what was found, and, where something is wrong, why that matters
  std::string remedy;  // what to do: a command where there is one; empty where nothing is wrong
  std::vector<int> ranks = {};

  // The same said by other ranks.
  bool SameAs(const Finding& other) const {
    return severity == other.severity && check == other.check && text == other.text && remedy == other.remedy;
  }
};

using Findings = std::vector<Finding>;

}  // namespace doctor

#endif  // TOOLS_DOCTOR_FINDING_H_
