// SPDX-License-Identifier: Apache-2.0
#include "examples/train/summary.h"

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace examples {
namespace {

using Json = nlohmann::ordered_json;

double Milliseconds(int64_t ns) { return static_cast<double>(ns) / 1e6; }

double MeanMilliseconds(const Durations& durations) {
  return durations.count() == 0 ? 0 : Milliseconds(durations.sum_ns()) / static_cast<double>(durations.count());
}

std::string OverlapText(const Summary& summary) {
  const ddp::DdpStatistics& c = summary.communication;
  std::string text = absl::StrFormat(
      "overlap: %.1f %% of the communication is hidden behind backward; exposed %.3f ms a step (median)\n"
      "  bucket        MiB      ready   launched       done   ms since the first gradient, in the last step\n",
      100 * summary.overlap(), summary.exposed_comm_ms);
  for (size_t i = 0; i < c.buckets.size(); ++i) {
    const ddp::BucketTimes& b = c.buckets[i];
    absl::StrAppendFormat(&text, "  %6d %10.2f %10.3f %10.3f %10.3f\n", i, static_cast<double>(b.bytes) / (1 << 20),
                          Milliseconds(b.ready_ns), Milliseconds(b.launched_ns), Milliseconds(b.done_ns));
  }
  return text;
}

double FlopsPerSecond(const Summary& summary) {
  return static_cast<double>(summary.flops_per_sample) * summary.samples_per_second;
}

std::optional<double> JoulesPerSample(const Summary& summary) {
  if (!summary.energy.has_value() || !summary.energy->joules().has_value() || summary.measured_steps == 0) return {};
  return *summary.energy->joules() / static_cast<double>(summary.measured_samples());
}

// What a figure does not contain.
constexpr absl::string_view kFlopsLimit = "only products and convolutions are counted";
// A processor's clock changes meanwhile, and convolutions can be faster than products.
constexpr absl::string_view kNoShare = "large matrix products, measured after the training, were slower";
std::string EnergyLimit(const EnergySum& energy) {
  return absl::StrCat(energy.counts, " only, with all that ran on them; no other parts, no losses of power supplies");
}

std::string CostText(const Summary& summary) {
  std::string text;
  if (summary.product_flops_per_second > 0 && summary.measured_steps > 0) {
    const double share = FlopsPerSecond(summary) / summary.product_flops_per_second;
    const double products = summary.product_flops_per_second / 1e9;
    absl::StrAppendFormat(&text, "%.4g GFLOP/s (%s): ", FlopsPerSecond(summary) / 1e9, kFlopsLimit);
    if (share <= 1) {
      absl::StrAppendFormat(&text, "%.1f %% of the %.4g GFLOP/s of large matrix products in this run\n", 100 * share,
                            products);
    } else {
      absl::StrAppendFormat(&text, "no share is given, as %s (%.4g GFLOP/s)\n", kNoShare, products);
    }
  }
  if (!summary.energy.has_value()) return text;
  const EnergySum& energy = *summary.energy;
  if (const std::optional<double> joules = JoulesPerSample(summary); joules.has_value()) {
    absl::StrAppendFormat(&text, "%.4g J a sample, %.4g W (%s)\n", *joules, *energy.joules() / energy.seconds,
                          EnergyLimit(energy));
  } else {
    absl::StrAppend(&text, "energy is not measured: ", energy.why_not, "\n");
  }
  return text;
}

Json EnergyJson(const Summary& summary) {
  const EnergySum& energy = *summary.energy;
  const std::optional<double> joules = JoulesPerSample(summary);
  if (!joules.has_value()) return {{"why_not", energy.why_not}};
  Json object = {{"joules_per_sample", *joules},
                 {"joules", *energy.joules()},
                 {"seconds", energy.seconds},
                 {"contains", EnergyLimit(energy)}};
  if (energy.gpu_joules.has_value()) object["gpu_joules"] = *energy.gpu_joules;
  if (energy.cpu_joules.has_value()) object["processor_joules"] = *energy.cpu_joules;
  object.update(Json::parse(energy.detail));
  return object;
}

}  // namespace

void Measure(const Durations& steps, const CommunicationTimes& times, Summary& summary) {
  if (steps.count() == 0) return;
  summary.warmup_counted = steps.warmup_counted();
  summary.measured_steps = steps.count();
  summary.samples_per_second =
      static_cast<double>(summary.measured_samples()) / (static_cast<double>(steps.sum_ns()) / 1e9);
  summary.step_ms_min = Milliseconds(steps.least_ns());
  summary.step_ms_max = Milliseconds(steps.most_ns());
  summary.step_ms_median = steps.median_ns() / 1e6;
  summary.exposed_comm_ms = times.exposed().median_ns() / 1e6;
  summary.mean_communication_ms = MeanMilliseconds(times.communication());
  summary.mean_exposed_ms = MeanMilliseconds(times.exposed());
}

std::string LossText(const Summary& summary) {
  return summary.final_loss.has_value() ? absl::StrFormat("loss %.4f", *summary.final_loss) : "loss not measured";
}

std::string ToText(const Summary& summary) {
  std::string text = absl::StrFormat("test accuracy %.2f %%, %s after %d steps\n", 100 * summary.test_accuracy,
                                     LossText(summary), summary.steps);
  if (summary.measured_steps > 0) {
    absl::StrAppendFormat(&text, "%.0f samples/s; a step takes %.3f ms (median of %d, %.3f to %.3f%s)\n",
                          summary.samples_per_second, summary.step_ms_median, summary.measured_steps,
                          summary.step_ms_min, summary.step_ms_max,
                          summary.warmup_counted ? "; warm-up included, as there were no other steps" : "");
  }
  if (summary.world_size > 1 && summary.communication_is_measured()) absl::StrAppend(&text, OverlapText(summary));
  absl::StrAppend(&text, CostText(summary));
  absl::StrAppendFormat(&text, "peak memory %d MiB a rank; parameters %s\n", summary.peak_rss_mb,
                        summary.parameters_sha256.substr(0, 16));
  return text;
}

absl::Status WriteJson(const Summary& summary, const std::string& path) {
  const auto if_measured = [&](double x) { return summary.cuda_graph ? Json() : Json(x); };  // of replays nothing is
  Json object = {
      {"test_accuracy", summary.test_accuracy},
      {"final_loss", summary.final_loss.has_value() ? Json(*summary.final_loss) : Json()},
      {"samples_per_second", summary.samples_per_second},
      {"step_ms", {{"median", summary.step_ms_median}, {"min", summary.step_ms_min}, {"max", summary.step_ms_max}}},
      {"exposed_comm_ms", if_measured(summary.exposed_comm_ms)},
      {"mean_exposed_ms", if_measured(summary.mean_exposed_ms)},
      {"mean_communication_ms", if_measured(summary.mean_communication_ms)},
      {"overlap", if_measured(summary.overlap())},
      {"measured_steps", summary.measured_steps},
      {"steps", summary.steps},
      {"skipped_steps", summary.skipped_steps},
      {"epochs", summary.epochs},
      {"world_size", summary.world_size},
      {"backend", summary.backend},
      {"device", summary.device},
      {"tf32", summary.tf32},
      {"cuda_graph", summary.cuda_graph},
      {"threads", summary.threads},
      {"batch", summary.batch},
      {"accumulate", summary.accumulate},
      {"optimizer", summary.optimizer},
      {"reduce", summary.reduce},
      {"parameters_sha256", summary.parameters_sha256},
      {"first_step_losses", summary.first_losses},
      {"peak_rss_mb", summary.peak_rss_mb},
  };
  if (summary.product_flops_per_second > 0 && summary.measured_steps > 0) {
    const double share = FlopsPerSecond(summary) / summary.product_flops_per_second;
    Json& operations = object["operations"] = {{"flops_per_sample", summary.flops_per_sample},
                                               {"flops_per_second", FlopsPerSecond(summary)},
                                               {"product_flops_per_second", summary.product_flops_per_second},
                                               {"contains", kFlopsLimit}};
    if (share <= 1) {
      operations["share_of_products"] = share;
    } else {
      operations["why_no_share"] = kNoShare;
    }
  }
  if (summary.energy.has_value()) object["energy"] = EnergyJson(summary);
  if (!summary.environment.empty()) object["environment"] = Json::parse(summary.environment);
  // Not by way of a temporary file: the path may well be a pipe or /dev/stdout.
  std::ofstream file(path);
  file << object.dump(2) << "\n";
  file.close();
  if (file.fail()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write the summary to ", path));
  return absl::OkStatus();
}

}  // namespace examples
