// SPDX-License-Identifier: Apache-2.0
// The table in nccl-tests' format, and the same rows as JSON.
#ifndef BENCH_REPORT_H_
#define BENCH_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/collective.h"
#include "bench/options.h"

namespace bench {

inline constexpr double kNotMeasured = std::numeric_limits<double>::quiet_NaN();

struct Row {
  Case shape;
  int64_t wrong = 0;
  double time_us = kNotMeasured, bound_us = kNotMeasured, p50_us = kNotMeasured, p99_us = kNotMeasured,
         host_us = kNotMeasured, link_ns = kNotMeasured, ordered_us = kNotMeasured, graph_us = kNotMeasured,
         peer_us = kNotMeasured, peer_host_us = kNotMeasured, peer_graph_us = kNotMeasured;
  bool registered = false;  // with NCCL: our memory, not the peer's
};

// How one kind of device times a case.
class Bench {
 public:
  virtual ~Bench() = default;
  virtual absl::StatusOr<Row> Run(const Case& c) = 0;  // collective
};

class Report {
 public:
  // `command` is quoted as it is. Checks that the JSON file can be written, if one is asked for: NotFound or
  // PermissionDenied here, not after the measurement.
  static absl::StatusOr<std::unique_ptr<Report>> Create(const Options& options, int ranks, absl::string_view backend,
                                                        std::string command);

  void PrintHeader() const;
  // One of them may be null.
  void Print(const Row* out_of_place, const Row* in_place);
  void PrintFooter() const;

  // Writes the rows and what they depend on: `environment` is a JSON object. An error if the file could not be written.
  // An earlier file of that name stays as it was until then.
  absl::Status Finish(const std::string& environment);
  bool writes_json() const { return !options_.json.empty(); }

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  Report(const Options& options, int ranks, absl::string_view backend, std::string command);
  absl::Status PrepareJson();
  absl::Status WriteJson(const std::string& text);
  absl::Status JsonError(int error) const;

  const Options options_;
  const int ranks_;
  const std::string backend_;
  const std::string command_;
  const std::string host_;
  std::vector<Row> rows_;
  std::string json_path_, new_json_path_;       // the second is written and then takes the place of the first
  std::unique_ptr<std::FILE, CloseFile> json_;  // where none can take its place: what is not a plain file
};

}  // namespace bench

#endif  // BENCH_REPORT_H_
