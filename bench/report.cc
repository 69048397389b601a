// SPDX-License-Identifier: Apache-2.0
#include "bench/report.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace bench {
namespace {

std::string HostDescription() {
  std::string model = "unknown processor";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(':');
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      model = std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
      break;
    }
  }
  utsname system{};
  uname(&system);
  return absl::StrCat(model, ", ", sysconf(_SC_NPROCESSORS_ONLN), " processors, ", system.sysname, " ", system.release);
}

double AlgBw(const Row& row) { return static_cast<double>(row.shape.bytes()) / row.time_us * 1e-3; }
double BusBw(const Row& row) { return AlgBw(row) * row.shape.BusFactor(); }
double Ratio(const Row& row) { return row.peer_us / row.time_us; }

// The columns after nccl-tests'.
enum Shown : uint8_t { kAlways, kOnCpu, kOnGpu, kWithPeer };
struct Column {
  const char *name, *unit;
  double (*value)(const Row& row);
  int decimals;
  Shown shown;
};
constexpr Column kColumns[] = {
    {"bound", "us", [](const Row& row) { return row.bound_us; }, 2, kAlways},
    {"p50", "us", [](const Row& row) { return row.p50_us; }, 2, kAlways},
    {"p99", "us", [](const Row& row) { return row.p99_us; }, 2, kAlways},
    {"host", "us", [](const Row& row) { return row.host_us; }, 3, kAlways},
    {"link", "ns", [](const Row& row) { return row.link_ns; }, 0, kOnCpu},
    {"ordered", "us", [](const Row& row) { return row.ordered_us; }, 2, kOnGpu},
    {"graph", "us", [](const Row& row) { return row.graph_us; }, 2, kOnGpu},
    {"reg", "", [](const Row& row) { return row.registered ? 1.0 : 0.0; }, 0, kOnGpu},
    {"peer", "us", [](const Row& row) { return row.peer_us; }, 2, kWithPeer},
    {"p.host", "us", [](const Row& row) { return row.peer_host_us; }, 3, kWithPeer},
    {"p.graph", "us", [](const Row& row) { return row.peer_graph_us; }, 2, kWithPeer},
    {"ratio", "", &Ratio, 3, kWithPeer},
};

bool IsShown(const Column& column, const Options& options) {
  return column.shown == kAlways || column.shown == (options.cuda ? kOnGpu : kOnCpu) ||
         (column.shown == kWithPeer && options.peer);
}

std::string Number(double value, int decimals) {
  return std::isfinite(value) ? absl::StrFormat("%.*f", decimals, value) : "N/A";
}

std::string FourColumns(const Row* row) {
  if (row == nullptr) return absl::StrFormat("  %9s %7s %7s %6s", "N/A", "N/A", "N/A", "N/A");
  return absl::StrFormat("  %9.2f %7.2f %7.2f %6d", row->time_us, AlgBw(*row), BusBw(*row), row->wrong);
}

std::string RedOp(const Case& c) { return c.info().reduces ? std::string(Name(c.op)) : "none"; }
int Root(const Case& c) { return c.info().rooted ? c.root : -1; }

// As nccl-tests: elements of a part, where the operation works on parts.
size_t Count(const Case& c) { return c.counts.front() > 0 ? c.counts.front() : c.count(); }

}  // namespace

absl::StatusOr<std::unique_ptr<Report>> Report::Create(const Options& options, int ranks, absl::string_view backend,
                                                       std::string command) {
  std::unique_ptr<Report> report(new Report(options, ranks, backend, std::move(command)));
  if (report->writes_json()) {
    if (absl::Status status = report->PrepareJson(); !status.ok()) return status;
  }
  return report;
}

absl::Status Report::JsonError(int error) const {
  return absl::ErrnoToStatus(error, absl::StrCat("--json=", options_.json, " cannot be written"));
}

absl::Status Report::PrepareJson() {
  std::error_code error;
  const bool exists = std::filesystem::exists(options_.json, error);
  // A link stays one.
  json_path_ = exists ? std::filesystem::canonical(options_.json, error).string() : options_.json;
  if (exists && !error && std::filesystem::is_regular_file(json_path_, error)) {
    if (access(json_path_.c_str(), W_OK) != 0) return JsonError(errno);
  } else if (exists) {  // a pipe or a terminal
    json_.reset(std::fopen(options_.json.c_str(), "w"));
    return json_ == nullptr ? JsonError(errno) : absl::OkStatus();
  }
  new_json_path_ = absl::StrCat(json_path_, ".new");
  const std::unique_ptr<std::FILE, CloseFile> attempt(std::fopen(new_json_path_.c_str(), "w"));
  if (attempt == nullptr) return JsonError(errno);
  std::remove(new_json_path_.c_str());
  return absl::OkStatus();
}

absl::Status Report::WriteJson(const std::string& text) {
  if (json_ == nullptr) json_.reset(std::fopen(new_json_path_.c_str(), "w"));
  if (json_ == nullptr) return JsonError(errno);
  const bool written = std::fputs(text.c_str(), json_.get()) >= 0;
  const bool closed = std::fclose(json_.release()) == 0;
  const int error = errno;
  if (new_json_path_.empty()) return written && closed ? absl::OkStatus() : JsonError(error);
  if (written && closed && std::rename(new_json_path_.c_str(), json_path_.c_str()) == 0) return absl::OkStatus();
  const absl::Status status = JsonError(written && closed ? errno : error);
  std::remove(new_json_path_.c_str());
  return status;
}

Report::Report(const Options& options, int ranks, absl::string_view backend, std::string command)
    : options_(options), ranks_(ranks), backend_(backend), command_(std::move(command)), host_(HostDescription()) {}

void Report::PrintHeader() const {
  absl::PrintF("# libddp %s: %s, %s, %s memory%s\n# %s\n# nranks %d backend %s validation %d\n# %s\n#\n", BENCH_VERSION,
               options_.cuda ? "cuda" : "cpu", options_.fresh ? "fresh" : "hot",
               options_.ordinary ? "ordinary" : "allocated", options_.peer ? ", beside its peer" : "", command_, ranks_,
               backend_, options_.checks, host_);
  std::string above = absl::StrFormat("#%14s %12s %13s %10s %6s %6s %34s %33s ", "", "", "", "", "", "",
                                      "out-of-place        ", "in-place          ");
  std::string names = absl::StrFormat("#%14s %12s %13s %10s %6s %6s", "", "size", "count", "type", "redop", "root");
  std::string units = absl::StrFormat("#%14s %12s %13s %10s %6s %6s", "", "(B)", "(elements)", "", "", "");
  for (int i = 0; i < 2; ++i) {
    absl::StrAppendFormat(&names, "  %9s %7s %7s %6s", "time", "algbw", "busbw", "#wrong");
    absl::StrAppendFormat(&units, "  %9s %7s %7s %6s", "(us)", "(GB/s)", "(GB/s)", "");
  }
  for (const Column& column : kColumns) {
    if (!IsShown(column, options_)) continue;
    absl::StrAppendFormat(&names, " %9s", column.name);
    absl::StrAppendFormat(&units, " %9s", *column.unit == 0 ? "" : absl::StrCat("(", column.unit, ")"));
  }
  absl::PrintF("%s\n%s\n%s\n", above, names, units);
}

void Report::Print(const Row* out_of_place, const Row* in_place) {
  const Row& row = in_place != nullptr ? *in_place : *out_of_place;
  std::string line = absl::StrFormat(" %14s %12d %13d %10s %6s %6d", row.shape.info().name, row.shape.bytes(),
                                     Count(row.shape), Name(row.shape.dtype), RedOp(row.shape), Root(row.shape));
  absl::StrAppend(&line, FourColumns(out_of_place), FourColumns(in_place));
  for (const Column& column : kColumns) {
    if (!IsShown(column, options_)) continue;
    const bool has_none = out_of_place != nullptr && !std::isfinite(column.value(row));
    absl::StrAppendFormat(&line, " %9s", Number(column.value(has_none ? *out_of_place : row), column.decimals));
  }
  absl::PrintF("%s\n", line);
  std::fflush(stdout);
  for (const Row* each : {out_of_place, in_place}) {
    if (each != nullptr) rows_.push_back(*each);
  }
}

void Report::PrintFooter() const {
  int64_t wrong = 0;
  double busbw = 0;
  for (const Row& row : rows_) {
    wrong += row.wrong;
    busbw += BusBw(row) / static_cast<double>(rows_.size());
  }
  absl::PrintF("# Out of bounds values : %d %s\n# Avg bus bandwidth    : %g\n#\n", wrong, wrong == 0 ? "OK" : "FAILED",
               busbw);
}

absl::Status Report::Finish(const std::string& environment) {
  if (!writes_json()) return absl::OkStatus();
  nlohmann::json list = nlohmann::json::array();
  for (const Row& row : rows_) {
    const Case& c = row.shape;
    nlohmann::json line = {{"collective", c.info().name},
                           {"bytes", c.bytes()},
                           {"count", Count(c)},
                           {"dtype", std::string(Name(c.dtype))},
                           {"op", RedOp(c)},
                           {"root", Root(c)},
                           {"placement", c.in_place ? "in-place" : "out-of-place"},
                           {"time_us", row.time_us},
                           {"algbw", AlgBw(row)},
                           {"busbw", BusBw(row)},
                           {"wrong", row.wrong}};
    for (const Column& column : kColumns) {
      if (!IsShown(column, options_)) continue;
      const double value = column.value(row);
      const std::string name = absl::StrReplaceAll(column.name, {{"p.", "peer_"}});
      if (std::isfinite(value)) line[absl::StrCat(name, *column.unit == 0 ? "" : "_", column.unit)] = value;
    }
    list.push_back(std::move(line));
  }
  const nlohmann::json all = {{"command", command_},
                              {"version", BENCH_VERSION},
                              {"host", host_},
                              {"ranks", ranks_},
                              {"device", options_.cuda ? "cuda" : "cpu"},
                              {"backend", backend_},
                              {"buffers", options_.ordinary ? "ordinary" : "allocated"},
                              {"mode", options_.fresh ? "fresh" : "hot"},
                              {"environment", nlohmann::json::parse(environment)},
                              {"rows", std::move(list)}};
  return WriteJson(all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace bench
