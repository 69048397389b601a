// SPDX-License-Identifier: Apache-2.0
// The doctor's findings as text and as JSON.
#ifndef TOOLS_DOCTOR_REPORT_H_
#define TOOLS_DOCTOR_REPORT_H_

#include <optional>
#include <string>

#include "tools/doctor/finding.h"

namespace doctor {

// A paragraph per finding that is worth one; those that are fine in a line each.
std::string ToText(const Findings& findings, int ranks);

// {"ranks", "errors", "warnings", "findings": [{"severity", "check", "text", "remedy", "ranks"}]}, and `environment`, a
// JSON object, under that name if there is one.
std::string ToJson(const Findings& findings, int ranks, const std::string& environment = "");

// One rank's findings on their way to rank 0.
std::string Pack(const Findings& findings);
std::optional<Findings> Unpack(const std::string& text);

// 1 if there is an error, else 0.
int ExitCode(const Findings& findings);

}  // namespace doctor

#endif  // TOOLS_DOCTOR_REPORT_H_
