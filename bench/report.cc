#include "bench/report.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
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

void PrintColumns(const Row* row, double algbw, double busbw) {
  if (row == nullptr) {
    std::printf("  %9s %7s %7s %6s", "N/A", "N/A", "N/A", "N/A");
    return;
  }
  std::printf("  %9.2f %7.2f %7.2f %6lld", row->time_us, algbw, busbw, static_cast<long long>(row->wrong));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Report>> Report::Create(const Options& options, int ranks, absl::string_view backend,
                                                       std::string command) {
  std::unique_ptr<Report> report(new Report(options, ranks, backend, std::move(command)));
  if (!options.json.empty()) {
    report->json_.reset(std::fopen(options.json.c_str(), "w"));
    if (report->json_ == nullptr) {
      return absl::ErrnoToStatus(errno, absl::StrCat("--json=", options.json, " cannot be written"));
    }
  }
  return report;
}

Report::Report(const Options& options, int ranks, absl::string_view backend, std::string command)
    : options_(options), ranks_(ranks), backend_(backend), command_(std::move(command)), host_(HostDescription()) {}

double Report::AlgBw(const Row& row) const { return static_cast<double>(row.bytes) / row.time_us * 1e-3; }

double Report::BusBw(const Row& row) const { return AlgBw(row) * 2 * (ranks_ - 1) / ranks_; }

void Report::PrintHeader() const {
  std::printf("# libddp %s: AllReduce and Wait, %s buffers, %s\n", BENCH_VERSION,
              options_.ordinary ? "ordinary" : "allocated", options_.fresh ? "fresh" : "hot");
  std::printf("# %s\n# nranks %d backend %s validation %d\n# %s\n#\n", command_.c_str(), ranks_, backend_.c_str(),
              options_.check, host_.c_str());
  std::printf("#%12s %13s %10s %6s %6s %34s %33s %10s %8s %8s\n", "", "", "", "", "", "out-of-place        ",
              "in-place          ", "", "", "");
  std::printf("#%12s %13s %10s %6s %6s  %9s %7s %7s %6s  %9s %7s %7s %6s %10s %8s %8s\n", "size", "count", "type",
              "redop", "root", "time", "algbw", "busbw", "#wrong", "time", "algbw", "busbw", "#wrong", "bound",
              "enqueue", "link");
  std::printf("#%12s %13s %10s %6s %6s  %9s %7s %7s %6s  %9s %7s %7s %6s %10s %8s %8s\n", "(B)", "(elements)", "", "",
              "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(ns)");
}

void Report::Print(const Row* out_of_place, const Row& in_place) {
  std::printf("%13zu %13zu %10s %6s %6d", in_place.bytes, in_place.count, std::string(Name(in_place.dtype)).c_str(),
              std::string(Name(in_place.op)).c_str(), -1);
  if (out_of_place != nullptr) rows_.push_back(*out_of_place);
  PrintColumns(out_of_place, out_of_place != nullptr ? AlgBw(*out_of_place) : 0,
               out_of_place != nullptr ? BusBw(*out_of_place) : 0);
  rows_.push_back(in_place);
  PrintColumns(&in_place, AlgBw(in_place), BusBw(in_place));
  std::printf(" %10.2f %8.3f %8.0f\n", in_place.bound_us, in_place.enqueue_us, in_place.link_ns);
  std::fflush(stdout);
}

void Report::PrintFooter() const {
  int64_t wrong = 0;
  double busbw = 0;
  for (const Row& row : rows_) {
    wrong += row.wrong;
    busbw += BusBw(row) / static_cast<double>(rows_.size());
  }
  std::printf("# Out of bounds values : %lld %s\n# Avg bus bandwidth    : %g\n#\n", static_cast<long long>(wrong),
              wrong == 0 ? "OK" : "FAILED", busbw);
}

absl::Status Report::Finish() {
  nlohmann::json list = nlohmann::json::array();
  int64_t wrong = 0;
  for (const Row& row : rows_) {
    wrong += row.wrong;
    list.push_back({{"ranks", ranks_},
                    {"bytes", row.bytes},
                    {"dtype", std::string(Name(row.dtype))},
                    {"op", std::string(Name(row.op))},
                    {"placement", row.in_place ? "in-place" : "out-of-place"},
                    {"buffers", options_.ordinary ? "ordinary" : "allocated"},
                    {"mode", options_.fresh ? "fresh" : "hot"},
                    {"time_us", row.time_us},
                    {"algbw", AlgBw(row)},
                    {"busbw", BusBw(row)},
                    {"bound_us", row.bound_us},
                    {"enqueue_us", row.enqueue_us},
                    {"link_ns", row.link_ns},
                    {"wrong", row.wrong},
                    {"command", command_},
                    {"version", BENCH_VERSION},
                    {"host", host_}});
  }
  if (json_ != nullptr) {
    const bool written = std::fputs((list.dump(1) + "\n").c_str(), json_.get()) >= 0;
    if (std::fclose(json_.release()) != 0 || !written) {
      return absl::ErrnoToStatus(errno, absl::StrCat("--json=", options_.json, " cannot be written"));
    }
  }
  return wrong == 0 ? absl::OkStatus() : absl::DataLossError(absl::StrCat(wrong, " elements of the results are wrong"));
}

}  // namespace bench
