// What a training run has to say at its end.
#ifndef EXAMPLES_TRAIN_SUMMARY_H_
#define EXAMPLES_TRAIN_SUMMARY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ddp/distributed_data_parallel.h"

namespace examples {

struct Summary {
  // The run.
  int world_size = 1;
  std::string backend;
  std::string device = "cpu";
  bool tf32 = false;
  int threads = 1;
  int batch = 0;
  int accumulate = 1;
  std::string optimizer;
  int64_t epochs = 0;         // completed, those before --resume included
  int64_t steps = 0;          // likewise
  int64_t skipped_steps = 0;  // of those, without an update, as gradients were not finite

  // The model.
  double test_accuracy = 0;  // 0 to 1
  double final_loss = 0;     // mean training loss of the last epoch
  std::string parameters_sha256;
  std::vector<double> first_losses;  // of up to 20 steps, the first of this run, on rank 0

  // Times of the steps after the warm-up, on rank 0. A step is everything from one optimizer step's end to the next
  // one's.
  int64_t measured_steps = 0;
  bool warmup_counted = false;  // there were no other steps
  double step_ms_median = 0, step_ms_min = 0, step_ms_max = 0;
  double samples_per_second = 0;  // of all ranks
  double exposed_comm_ms = 0;     // median
  ddp::DdpStatistics communication;
  int64_t peak_rss_mb = 0;  // of the rank with the most
};

// Fills in the times, from those of every step of this run. Reorders both.
void Measure(std::vector<int64_t>& step_ns, std::vector<int64_t>& exposed_ns, int64_t warmup, Summary& summary);

// Several lines for people.
std::string ToText(const Summary& summary);

// The file's keys: see --summary_json in docs and tests. An error names the file.
absl::Status WriteJson(const Summary& summary, const std::string& path);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_SUMMARY_H_
