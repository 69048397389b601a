#include "examples/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/data/file.h"
#include "examples/nn/loss.h"
#include "examples/train/agreement.h"
#include "examples/train/host.h"

namespace examples {
namespace {

absl::Status Wait(absl::StatusOr<ddp::Work> work) { return work.ok() ? work->Wait() : work.status(); }

int64_t Nanoseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

// News that outweighs any signal.
constexpr int32_t kSaveFailed = 1000;

// Without its learning rate.
std::unique_ptr<nn::Optimizer> MakeOptimizer(const TrainFlags& flags, size_t count) {
  if (flags.optimizer == "adam") {
    return std::make_unique<nn::Adam>(count, nn::AdamOptions{.weight_decay = flags.weight_decay});
  }
  return std::make_unique<nn::Sgd>(count,
                                   nn::SgdOptions{.momentum = flags.momentum, .weight_decay = flags.weight_decay});
}

SyncMode ModeOf(const TrainFlags& flags) {
  if (flags.no_ddp) return SyncMode::kNone;
  return flags.no_sync ? SyncMode::kNoSync : SyncMode::kDdp;
}

}  // namespace

Trainer::Trainer(ddp::ProcessGroup& group, const TrainFlags& flags, const Dataset& data, nn::Model& model,
                 Console& console)
    : group_(group),
      flags_(flags),
      data_(data),
      model_(model),
      console_(console),
      sampler_({.samples = data.train.count(),
                .batch = static_cast<size_t>(flags.batch),
                .rank = group.rank(),
                .world_size = group.size(),
                .seed = flags.seed,
                .drop_last = flags.drop_last}),
      pixels_(hwy::AllocateAligned<float>(static_cast<size_t>(flags.batch) * static_cast<size_t>(data.features()))),
      labels_(static_cast<size_t>(flags.batch)),
      evaluation_share_(EvaluationShare(data.test.count(), group.rank(), group.size())) {
  if (pixels_ == nullptr) throw std::bad_alloc();
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(ddp::ProcessGroup& group, const TrainFlags& flags,
                                                         const Dataset& data, nn::Model& model, Console& console) {
  std::unique_ptr<Trainer> trainer(new Trainer(group, flags, data, model, console));
  if (absl::Status status = trainer->Start(); !status.ok()) return status;
  return trainer;
}

absl::Status Trainer::Start() {
  if (flags_.no_ddp && group_.size() > 1) {
    return Agreed(
        absl::InvalidArgumentError("--no_ddp is for one rank; with several, --no_sync trains without reduction"));
  }
  if (sampler_.batches() == 0) {
    return Agreed(absl::InvalidArgumentError(
        absl::StrCat("--drop_last leaves nothing of ", data_.train.count(), " training images in global batches of ",
                     sampler_.global_batch(), "; give a smaller --batch, or leave out --drop_last")));
  }
  absl::StatusOr<std::unique_ptr<Replica>> replica = Replica::Create(model_, group_, ModeOf(flags_));
  if (!replica.ok()) return replica.status();
  replica_ = *std::move(replica);
  optimizer_ = MakeOptimizer(flags_, replica_->values().size());
  progress_.seed = static_cast<int64_t>(flags_.seed);
  progress_.train_samples = static_cast<int64_t>(data_.train.count());
  progress_.drop_last = flags_.drop_last ? 1 : 0;
  progress_.lr = DefaultLr(flags_.optimizer);
  progress_.momentum = flags_.momentum;
  progress_.weight_decay = flags_.weight_decay;
  model_.Initialize(flags_.seed);
  if (absl::Status status = Resume(); !status.ok()) return status;
  if (absl::Status status = BroadcastState(); !status.ok()) return status;
  if (flags_.lr.has_value()) progress_.lr = *flags_.lr;
  optimizer_->set_lr(progress_.lr);
  if (group_.rank() == 0 && !flags_.save.empty()) {
    writer_ = std::make_unique<CheckpointWriter>(flags_.save, flags_.optimizer);
  }
  if (!flags_.no_sync) {
    absl::StatusOr<StepNotice> notice = StepNotice::Create(group_);
    if (!notice.ok()) return notice.status();
    notice_ = *std::move(notice);
  }

  last_step_ = progress_.step + (flags_.epochs - progress_.epoch) * static_cast<int64_t>(sampler_.batches()) -
               progress_.epoch_samples / static_cast<int64_t>(sampler_.global_batch());
  if (flags_.steps > 0) last_step_ = std::min(last_step_, flags_.steps);
  const int64_t steps = std::clamp<int64_t>(last_step_ - progress_.step, 0, 1 << 20);
  step_ns_.reserve(static_cast<size_t>(steps));
  exposed_ns_.reserve(static_cast<size_t>(steps));
  return absl::OkStatus();
}

// Rank 0 reads the checkpoint; the others need not even see the file.
absl::Status Trainer::Resume() {
  absl::Status status;
  if (group_.rank() == 0 && !flags_.resume.empty()) {
    RemoveUnfinished(flags_.resume);
    const absl::StatusOr<Progress> saved = LoadCheckpoint(flags_.resume, flags_.optimizer, Tensors());
    status = saved.status();
    if (saved.ok()) {
      progress_ = *saved;
      status = CheckResumed();
    }
  }
  if (group_.rank() == 0 && status.ok() && !flags_.save.empty()) status = CheckSaveable();
  return AgreeOn(group_, status);
}

// A folder that cannot be written to is better found now than after an epoch.
absl::Status Trainer::CheckSaveable() const {
  const absl::Status status = AtomicFile::Create(flags_.save).status();
  if (status.ok() || absl::IsFailedPrecondition(status)) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), "; give --save a file that can be written"));
}

absl::Status Trainer::CheckResumed() const {
  const auto refuse = [this](auto&&... what) {
    return absl::FailedPreconditionError(absl::StrCat("cannot resume from ", flags_.resume, ": ", what...));
  };
  const auto global_batch = static_cast<int64_t>(sampler_.global_batch());
  const auto seed = static_cast<uint64_t>(progress_.seed);
  if (seed != flags_.seed) return refuse("it was saved with another seed; give --seed=", seed);
  if (progress_.train_samples != static_cast<int64_t>(data_.train.count())) {
    return refuse("it was saved from a data set of ", progress_.train_samples, " training images, this one has ",
                  data_.train.count(), "; give the same --data");
  }
  for (const auto& [flag, saved, given] :
       {std::tuple("momentum", progress_.momentum, flags_.momentum),
        std::tuple("weight_decay", progress_.weight_decay, flags_.weight_decay),
        std::tuple("drop_last", static_cast<double>(progress_.drop_last), flags_.drop_last ? 1.0 : 0.0)}) {
    if (saved != given) {
      return refuse("it was saved with --", flag, "=", saved, ", this run has --", flag, "=", given,
                    "; give what it was saved with");
    }
  }
  if (progress_.epoch_samples % global_batch != 0) {
    return refuse("it was saved after ", progress_.epoch_samples, " samples of an epoch, which is no whole number of ",
                  "global batches of ", global_batch, "; give the --batch and number of ranks it was saved with");
  }
  return absl::OkStatus();
}

// Rank 0's parameters, optimizer state and progress, to all ranks.
absl::Status Trainer::BroadcastState() {
  const absl::Span<float> values = replica_->values();
  std::vector<ddp::Buffer> floats = {{values.data(), values.size(), ddp::DType::kFloat32, {}}};
  for (const nn::NamedState& state : optimizer_->state()) {
    floats.push_back({state.data.data(), state.data.size(), ddp::DType::kFloat32, {}});
  }
  const ddp::Buffer numbers = {&progress_, sizeof(progress_), ddp::DType::kUInt8, {}};
  if (absl::Status status = Wait(group_.Broadcast(floats, 0)); !status.ok()) return status;
  if (absl::Status status = Wait(group_.Broadcast({numbers}, 0)); !status.ok()) return status;
  optimizer_->set_steps(progress_.optimizer_steps);
  return absl::OkStatus();
}

// Parameter by parameter, so that a checkpoint depends neither on the memory's layout nor on the number of ranks.
std::vector<Tensor> Trainer::Tensors() const {
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < model_.parameters().size(); ++i) {
    const nn::ParameterSpec& spec = model_.parameters()[i];
    const auto part = [&](absl::Span<float> all) { return all.subspan(replica_->offset(i), spec.count()); };
    tensors.push_back({spec.name, spec.shape, part(replica_->values())});
    for (const nn::NamedState& state : optimizer_->state()) {
      tensors.push_back({absl::StrCat(spec.name, "/", state.name), spec.shape, part(state.data)});
    }
  }
  return tensors;
}

bool Trainer::Finished() const { return progress_.step >= last_step_ || progress_.epoch >= flags_.epochs; }

absl::StatusOr<Summary> Trainer::Run() {
  bool evaluated = false;
  while (!Finished()) {
    if (absl::Status status = RunEpoch(); !status.ok()) return status;
    if (absl::Status status = Evaluate(); !status.ok()) return status;
    if (absl::Status status = Save(); !status.ok()) return status;
    evaluated = true;
    const int64_t epoch = progress_.epoch + (progress_.epoch_samples > 0 ? 1 : 0);
    console_.Print(absl::StrFormat("epoch %d, step %d of %d: loss %.4f, test accuracy %.2f %%\n", epoch, progress_.step,
                                   last_step_, summary_.final_loss, 100 * summary_.test_accuracy));
  }
  if (!evaluated) {
    if (absl::Status status = Evaluate(); !status.ok()) return status;
  }
  if (absl::Status status = FinishSaving(); !status.ok()) return status;
  return Summarize();
}

absl::Status Trainer::RunEpoch() {
  const int64_t epoch = progress_.epoch;
  const auto global_batch = static_cast<int64_t>(sampler_.global_batch());
  loss_sum_ = group_.rank() == 0 ? progress_.loss_sum : 0;
  loss_steps_ = group_.rank() == 0 ? progress_.loss_steps : 0;
  // A step lasts from the end of the one before to its own end, so that nothing between them is left out of the
  // figures.
  Clock::time_point before = Clock::now();
  sampler_.SetEpoch(static_cast<uint64_t>(epoch));
  while (progress_.epoch == epoch && progress_.step < last_step_) {
    const int64_t batch = progress_.epoch_samples / global_batch;
    if (absl::Status status = Step(sampler_.Batch(static_cast<size_t>(batch))); !status.ok()) return status;
    Advance();
    const Clock::time_point now = Clock::now();
    step_ns_.push_back(Nanoseconds(now - before));
    console_.Step(now, progress_.step, last_step_, loss_sum_ / static_cast<double>(loss_steps_));
    before = now;
    if (absl::Status status = AfterStep(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Trainer::Step(absl::Span<const uint32_t> samples) {
  {
    const ddp::TraceScope scope(group_, "forward");
    GatherBatch(data_, data_.train, samples, pixels_.get(), labels_.data());
    const absl::Span<const float> logits = model_.Forward(pixels_.get(), static_cast<int>(samples.size()));
    loss_sum_ += nn::SoftmaxCrossEntropy(logits, labels_, model_.output_grad());
  }
  ++loss_steps_;
  news_ = writer_ != nullptr && writer_->failed() ? kSaveFailed : StopSignal();
  if (notice_.has_value()) {
    if (absl::Status status = notice_->Begin(news_); !status.ok()) return status;
  }
  {
    const ddp::TraceScope scope(group_, "backward");
    replica_->Backward();
  }
  const Clock::time_point before = Clock::now();
  if (absl::Status status = replica_->FinishBackward(); !status.ok()) return status;
  exposed_ns_.push_back(Nanoseconds(Clock::now() - before));
  if (notice_.has_value()) {
    const absl::StatusOr<int32_t> news = notice_->End();
    if (!news.ok()) return news.status();
    news_ = *news;
  }
  const ddp::TraceScope scope(group_, "optimizer");
  optimizer_->Step(replica_->values(), replica_->grads());
  return absl::OkStatus();
}

void Trainer::Advance() {
  ++progress_.step;
  progress_.epoch_samples += static_cast<int64_t>(sampler_.global_batch());
  if (progress_.epoch_samples < static_cast<int64_t>(sampler_.batches() * sampler_.global_batch())) return;
  ++progress_.epoch;
  progress_.epoch_samples = 0;
  progress_.loss_steps = 0;
  progress_.loss_sum = 0;
}

// What all ranks know that they have to do now. A run that ends anyway, or an epoch, saves then.
absl::Status Trainer::AfterStep() {
  if (news_ == kSaveFailed) return FinishSaving();
  if (Finished()) return absl::OkStatus();
  if (news_ != 0) return Stop(news_);
  const bool due = flags_.save_every > 0 && progress_.step % flags_.save_every == 0;
  return due && progress_.epoch_samples > 0 ? Save() : absl::OkStatus();
}

absl::Status Trainer::Stop(int signal) {
  const std::string what = absl::StrCat("stopped by ", SignalName(signal), " after step ", progress_.step);
  if (!notice_.has_value()) {
    // The other ranks do not know, and wait for this one at the epoch's end.
    const absl::Status why = absl::CancelledError(what);
    group_.Abort(why);
    return why;
  }
  if (flags_.save.empty()) return Agreed(absl::CancelledError(absl::StrCat(what, "; nothing is saved without --save")));
  if (absl::Status status = Save(); !status.ok()) return status;
  if (absl::Status status = FinishSaving(); !status.ok()) return status;
  return Agreed(absl::CancelledError(absl::StrCat(what, "; go on from there with --resume=", flags_.save)));
}

// The mean training loss since the epoch began, and the share of test images that are recognised, each by one rank.
absl::Status Trainer::Evaluate() {
  double sums[] = {loss_sum_, static_cast<double>(loss_steps_), 0, static_cast<double>(evaluation_share_.size())};
  const size_t batch = static_cast<size_t>(flags_.batch);
  for (size_t first = 0; first < evaluation_share_.size(); first += batch) {
    const auto samples = absl::MakeConstSpan(evaluation_share_).subspan(first, batch);
    GatherBatch(data_, data_.test, samples, pixels_.get(), labels_.data());
    const absl::Span<const float> logits = model_.Forward(pixels_.get(), static_cast<int>(samples.size()));
    sums[2] += static_cast<double>(nn::CountCorrect(logits, absl::MakeConstSpan(labels_).first(samples.size())));
  }
  const ddp::Buffer buffer = {sums, std::size(sums), ddp::DType::kFloat64, {}};
  if (absl::Status status = Wait(group_.AllReduce({buffer}, {buffer})); !status.ok()) return status;
  summary_.final_loss = sums[1] > 0 ? sums[0] / sums[1] : 0;
  summary_.test_accuracy = sums[2] / sums[3];
  if (!std::isfinite(summary_.final_loss)) return LossNotFinite();
  if (!flags_.deterministic || flags_.no_sync) return absl::OkStatus();
  return RequireSame(
      group_, absl::StrCat("parameters of SHA-256 ", replica_->ParametersSha256(), " after step ", progress_.step),
      "they should be equal: please report this as a bug");
}

absl::Status Trainer::LossNotFinite() const {
  return Agreed(absl::OutOfRangeError(absl::StrCat("the training loss is not finite any more after step ",
                                                   progress_.step, "; give a lower --lr than ", optimizer_->lr())));
}

// Begins to write the checkpoint. A state that training has spoilt must not replace a good one.
absl::Status Trainer::Save() {
  if (flags_.save.empty()) return absl::OkStatus();
  if (progress_.epoch_samples > 0) {
    double sums[] = {loss_sum_, static_cast<double>(loss_steps_)};
    const ddp::Buffer buffer = {sums, std::size(sums), ddp::DType::kFloat64, {}};
    if (absl::Status status = Wait(group_.AllReduce({buffer}, {buffer})); !status.ok()) return status;
    if (!std::isfinite(sums[0])) return LossNotFinite();
    progress_.loss_sum = sums[0];
    progress_.loss_steps = static_cast<int64_t>(sums[1]);
  }
  progress_.optimizer_steps = optimizer_->steps();
  progress_.lr = optimizer_->lr();
  if (writer_ != nullptr) writer_->Start(progress_, Tensors());
  return absl::OkStatus();
}

// Waits until all is written, and fails on all ranks where it is not.
absl::Status Trainer::FinishSaving() {
  if (flags_.save.empty()) return absl::OkStatus();
  return AgreeOn(group_, writer_ != nullptr ? writer_->Finish() : absl::OkStatus());
}

absl::StatusOr<Summary> Trainer::Summarize() {
  summary_.world_size = group_.size();
  summary_.backend = std::string(group_.backend());
  summary_.threads = flags_.threads;
  summary_.batch = flags_.batch;
  summary_.optimizer = flags_.optimizer;
  summary_.epochs = progress_.epoch;
  summary_.steps = progress_.step;
  summary_.parameters_sha256 = replica_->ParametersSha256();
  summary_.communication = replica_->statistics();
  Measure(step_ns_, exposed_ns_, flags_.warmup, summary_);
  summary_.peak_rss_mb = PeakRssMb();
  const ddp::Buffer peak = {&summary_.peak_rss_mb, 1, ddp::DType::kInt64, {}};
  if (absl::Status status = Wait(group_.AllReduce({peak}, {peak}, {.op = ddp::ReduceOp::kMax})); !status.ok()) {
    return status;
  }
  return summary_;
}

std::string Trainer::Plan() const {
  size_t numbers = 0;
  for (const nn::ParameterSpec& spec : model_.parameters()) numbers += spec.count();
  std::string plan = absl::StrFormat(
      "%d parameters; %s, learning rate %g; batch %d on each rank, %d in all; %s step %d of %d, seed %d", numbers,
      flags_.optimizer, optimizer_->lr(), flags_.batch, sampler_.global_batch(),
      flags_.resume.empty() ? "from" : absl::StrCat("resumed from ", flags_.resume, " at"), progress_.step, last_step_,
      flags_.seed);
  if (flags_.no_ddp) absl::StrAppend(&plan, "; without DistributedDataParallel");
  if (flags_.no_sync) absl::StrAppend(&plan, "; gradients are not reduced");
  return plan;
}

}  // namespace examples
