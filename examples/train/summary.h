// SPDX-License-Identifier: Apache-2.0
// The results of a training run.
#ifndef EXAMPLES_TRAIN_SUMMARY_H_
#define EXAMPLES_TRAIN_SUMMARY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ddp/distributed_data_parallel.h"
#include "examples/train/communication_times.h"
#include "examples/train/durations.h"
#include "examples/train/energy.h"

namespace examples {

struct Summary {
  // The run.
  int world_size = 1;
  std::string backend;
  std::string device = "cpu";
  bool tf32 = false;
  bool cuda_graph = false;  // steps were replayed
  int threads = 1;
  int batch = 0;
  int accumulate = 1;
  std::string optimizer;
  std::string reduce;         // see --reduce
  int64_t epochs = 0;         // epochs completed, including those before --resume
  int64_t steps = 0;          // steps completed, including those before --resume
  int64_t skipped_steps = 0;  // steps without an update, because gradients were not finite

  std::string environment;  // of rank 0, as JSON, or empty; see environment.h

  // The model.
  double test_accuracy = 0;          // 0 to 1
  std::optional<double> final_loss;  // mean training loss of the last epoch; none without one
  std::string parameters_sha256;
  std::vector<double> first_losses;  // losses of the first steps of this run, means over the ranks; up to 20

  // Times of the steps after the warm-up, on rank 0; only those since the last recovery, if it was without ranks that
  // had trained before. A step lasts from the end of one optimizer step to the end of the next.
  int64_t measured_steps = 0;
  bool warmup_counted = false;  // warm-up steps are included, because there were no others
  double step_ms_median = 0, step_ms_min = 0, step_ms_max = 0;
  double samples_per_second = 0;  // all ranks together
  double exposed_comm_ms = 0;     // median
  // Of the same steps (on GPUs, of some of them), so that one can be taken from the other: the time in which a bucket
  // was under way, and the part of it that the backward pass did not hide.
  double mean_communication_ms = 0, mean_exposed_ms = 0;
  ddp::DdpStatistics communication;
  int64_t peak_rss_mb = 0;  // the largest of all ranks

  // What the measured steps cost.
  int64_t flops_per_sample = 0;         // see nn::Model::flops
  double product_flops_per_second = 0;  // of large matrix products on all ranks, measured in this run; 0: not measured
  std::optional<EnergySum> energy;

  bool communication_is_measured() const { return !cuda_graph && !communication.buckets.empty(); }
  // The part of the communication that the backward pass hid, 0 to 1; 0 without communication.
  double overlap() const { return mean_communication_ms > 0 ? 1 - mean_exposed_ms / mean_communication_ms : 0; }
  int64_t measured_samples() const { return measured_steps * batch * accumulate * world_size; }
};

// Computes the times from those of the steps of this run.
void Measure(const Durations& steps, const CommunicationTimes& times, Summary& summary);

// "loss 0.0123", or that there is none.
std::string LossText(const Summary& summary);

// Returns a summary of several lines to print.
std::string ToText(const Summary& summary);

// Writes the summary to `path`. An error names the file.
absl::Status WriteJson(const Summary& summary, const std::string& path);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_SUMMARY_H_
