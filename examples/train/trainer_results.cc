// SPDX-License-Identifier: Apache-2.0
// What a Trainer finds out about its training: losses and accuracy after each epoch, and a summary at the end.
#include <cmath>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "ddp/collectives.h"
#include "examples/train/agreement.h"
#include "examples/train/host.h"
#include "examples/train/trainer.h"

namespace examples {

// The mean training loss since the epoch began, and the share of test images that are recognised, each by one rank.
absl::Status Trainer::Evaluate() {
  // A GPU's last losses come after its steps.
  double sums[] = {LossIsLost() ? NAN : loss_sum_, static_cast<double>(loss_steps_), 0,
                   static_cast<double>(evaluation_share_.size())};
  const size_t batch = static_cast<size_t>(flags_.batch);
  if (absl::Status status = replica_->BeginForward(); !status.ok()) return status;
  model_.SetTraining(false);
  const ddp::Autocast autocast(ddp::Device::Kind::kCpu, AutocastType());
  auto* const hits = static_cast<int64_t*>(hits_memory_.get());
  *hits = 0;
  for (size_t first = 0; first < evaluation_share_.size(); first += batch) {
    const auto samples = absl::MakeConstSpan(evaluation_share_).subspan(first, batch);
    auto* const pixels = static_cast<float*>(evaluation_.get());
    auto* const labels = reinterpret_cast<int32_t*>(pixels + samples.size() * static_cast<size_t>(data_.features()));
    device_.Wait();  // for what was uploaded from there
    if (absl::Status status = GatherBatch(data_, data_.test, samples, {}, pixels, labels, flags_.loader_threads);
        !status.ok()) {
      return status;
    }
    Batch share{pixels, {labels, samples.size()}};
    if (!device_.is_host()) share = Upload(share, 0);
    const int rows = static_cast<int>(samples.size());
    const absl::Span<const float> logits = model_.Forward(share.pixels, rows);
    device_.CountHits(logits.data(), share.labels.data(), rows, data_.classes, hits);
    device_.Release(0);
  }
  if (absl::Status status = AwaitSteps(); !status.ok()) return status;
  KeepBuffers();
  sums[2] = static_cast<double>(*hits);
  model_.SetTraining(true);
  const ddp::Buffer buffer = {sums, std::size(sums), ddp::DType::kFloat64, {}};
  if (absl::Status status = group_->AllReduce(buffer, buffer).Wait(); !status.ok()) return status;
  summary_.final_loss = sums[1] > 0 ? std::optional(sums[0] / sums[1]) : std::nullopt;
  summary_.test_accuracy = sums[2] / sums[3];
  if (!std::isfinite(sums[0])) return LostLoss();
  if (!flags_.deterministic || !Reduces()) return absl::OkStatus();
  return RequireSame(
      *group_, absl::StrCat("parameters of SHA-256 ", replica_->ParametersSha256(), " after step ", progress_.step),
      "they should be equal: please report this as a bug");
}

// From those of each rank. After a recovery ranks may have noted more of them than others.
absl::Status Trainer::AverageFirstLosses() {
  std::vector<double>& losses = summary_.first_losses;
  auto count = static_cast<int64_t>(losses.size());
  losses.resize(kFirstLosses);
  const ddp::Buffer counts = {&count, 1, ddp::DType::kInt64, {}};
  if (absl::Status s = group_->AllReduce(counts, counts, {.op = ddp::ReduceOp::kMin}).Wait(); !s.ok()) return s;
  const ddp::Buffer buffer = {losses.data(), losses.size(), ddp::DType::kFloat64, {}};
  if (absl::Status s = group_->AllReduce(buffer, buffer, {.op = ddp::ReduceOp::kAvg}).Wait(); !s.ok()) return s;
  losses.resize(static_cast<size_t>(count));
  return absl::OkStatus();
}

absl::Status Trainer::Summarize() {
  summary_.world_size = group_->size();
  summary_.backend = std::string(group_->backend());
  summary_.device = device_.name();
  summary_.tf32 = flags_.tf32;
  summary_.cuda_graph = uses_graphs_ && started_ > eager_until_;
  summary_.threads = flags_.threads;
  summary_.batch = flags_.batch;
  summary_.accumulate = flags_.accumulate;
  summary_.optimizer = flags_.optimizer;
  summary_.reduce = flags_.reduce;
  summary_.epochs = progress_.epoch;
  summary_.steps = progress_.step;
  summary_.skipped_steps = progress_.step - optimizer_->steps();
  summary_.parameters_sha256 = replica_->ParametersSha256();
  summary_.communication = replica_->statistics();
  if (absl::Status status = AverageFirstLosses(); !status.ok()) return status;
  Measure(step_times_, communication_times_, summary_);
  summary_.peak_rss_mb = PeakRssMb();
  const ddp::Buffer peak = {&summary_.peak_rss_mb, 1, ddp::DType::kInt64, {}};
  if (absl::Status status = group_->AllReduce(peak, peak, {.op = ddp::ReduceOp::kMax}).Wait(); !status.ok()) {
    return status;
  }
  return SummarizeCost();
}

// Operations and energy. All ranks measure at the same time, as they computed.
absl::Status Trainer::SummarizeCost() {
  summary_.flops_per_sample = model_.flops();
  double rate[] = {0, 0};  // and how many ranks have measured it
  if (!flags_.summary_json.empty()) {
    rate[0] = device_.ProductRate(AutocastType() == ddp::DType::kBFloat16);
    rate[1] = rate[0] > 0 ? 1 : 0;
  }
  const ddp::Buffer rates = {rate, std::size(rate), ddp::DType::kFloat64, {}};
  if (absl::Status status = group_->AllReduce(rates, rates).Wait(); !status.ok()) return status;
  if (rate[1] == group_->size()) summary_.product_flops_per_second = rate[0];
  if (energy_ == nullptr) return absl::OkStatus();
  const absl::StatusOr<std::vector<std::string>> records = ddp::GatherStrings(*group_, energy_->Record());
  if (!records.ok()) return records.status();
  summary_.energy = SumEnergy(*records);
  return absl::OkStatus();
}

}  // namespace examples
