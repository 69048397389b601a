// The table in nccl-tests' format, and the same rows as JSON.
#ifndef BENCH_REPORT_H_
#define BENCH_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/options.h"
#include "ddp/types.h"

namespace bench {

struct Row {
  size_t bytes = 0;
  size_t count = 0;
  ddp::DType dtype = ddp::DType::kFloat32;
  ddp::ReduceOp op = ddp::ReduceOp::kSum;
  bool in_place = true;
  double time_us = 0;
  double bound_us = 0;
  double enqueue_us = 0;
  double link_ns = 0;
  int64_t wrong = 0;
};

class Report {
 public:
  // `command` is quoted as it is. Opens the JSON file, if one is asked for: NotFound or PermissionDenied here, not
  // after the measurement.
  static absl::StatusOr<std::unique_ptr<Report>> Create(const Options& options, int ranks, absl::string_view backend,
                                                        std::string command);

  void PrintHeader() const;
  void Print(const Row* out_of_place, const Row& in_place);
  void PrintFooter() const;

  // DataLoss if a result was wrong, Unavailable if the file could not be written.
  absl::Status Finish();

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  Report(const Options& options, int ranks, absl::string_view backend, std::string command);
  double AlgBw(const Row& row) const;
  double BusBw(const Row& row) const;

  const Options options_;
  const int ranks_;
  const std::string backend_;
  const std::string command_;
  const std::string host_;
  std::vector<Row> rows_;
  std::unique_ptr<std::FILE, CloseFile> json_;
};

}  // namespace bench

#endif  // BENCH_REPORT_H_
