// SPDX-License-Identifier: Apache-2.0
#include "tools/doctor/report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace doctor {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSeverities[] = {"ok", "note", "warning", "error"};

const char* Name(Severity severity) { return kSeverities[static_cast<size_t>(severity)]; }

Json ToObject(const Finding& f) {
  return {
      {"severity", Name(f.severity)}, {"check", f.check}, {"text", f.text}, {"remedy", f.remedy}, {"ranks", f.ranks}};
}

std::optional<Severity> SeverityOf(const std::string& name) {
  const auto* const found = std::find(std::begin(kSeverities), std::end(kSeverities), name);
  if (found == std::end(kSeverities)) return std::nullopt;
  return static_cast<Severity>(found - std::begin(kSeverities));
}

int Count(const Findings& findings, Severity severity) {
  return static_cast<int>(
      std::count_if(findings.begin(), findings.end(), [&](const Finding& f) { return f.severity == severity; }));
}

// What libraries and files say may be any bytes.
std::string Dump(const Json& json, int indent) { return json.dump(indent, ' ', false, Json::error_handler_t::replace); }

}  // namespace

std::string ToText(const Findings& findings, int ranks) {
  std::string text;
  for (const Finding& f : findings) {
    absl::StrAppend(&text, Name(f.severity), ": ", f.text);
    if (ranks > 1 && static_cast<int>(f.ranks.size()) < ranks) {
      absl::StrAppend(&text, " (rank", f.ranks.size() == 1 ? " " : "s ", absl::StrJoin(f.ranks, ", "), ")");
    }
    absl::StrAppend(&text, "\n");
    if (!f.remedy.empty() && f.severity != Severity::kOk) absl::StrAppend(&text, "    remedy: ", f.remedy, "\n");
  }
  const int errors = Count(findings, Severity::kError), warnings = Count(findings, Severity::kWarning);
  absl::StrAppend(&text, errors, errors == 1 ? " error, " : " errors, ", warnings,
                  warnings == 1 ? " warning\n" : " warnings\n");
  return text;
}

std::string ToJson(const Findings& findings, int ranks, const std::string& environment) {
  Json json;
  json["ranks"] = ranks;
  json["errors"] = Count(findings, Severity::kError);
  json["warnings"] = Count(findings, Severity::kWarning);
  json["findings"] = Json::array();
  for (const Finding& f : findings) json["findings"].push_back(ToObject(f));
  if (!environment.empty()) json["environment"] = Json::parse(environment);
  return Dump(json, 1) + "\n";
}

std::string Pack(const Findings& findings) {
  Json json = Json::array();
  for (const Finding& f : findings) json.push_back(ToObject(f));
  return Dump(json, -1);
}

std::optional<Findings> Unpack(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_array()) return std::nullopt;
  Findings findings;
  for (const Json& f : json) {
    if (!f.is_object() || !f.contains("severity")) return std::nullopt;
    const std::optional<Severity> severity = SeverityOf(f.value("severity", ""));
    if (!severity.has_value()) return std::nullopt;
    findings.push_back({*severity, f.value("check", ""), f.value("text", ""), f.value("remedy", "")});
  }
  return findings;
}

int ExitCode(const Findings& findings) { return Count(findings, Severity::kError) > 0 ? 1 : 0; }

}  // namespace doctor
