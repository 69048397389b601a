// SPDX-License-Identifier: Apache-2.0
#include "examples/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ddp/observer.h"
#include "examples/nn/loss.h"
#include "examples/train/agreement.h"
#include "examples/train/host.h"

namespace examples {
namespace {

// News that outweighs any signal; and what outweighs that, by which the ranks learn whose loss it is.
constexpr int32_t kSaveFailed = 1000;
constexpr int32_t kNonFiniteLoss = 2000;

// A border that leaves the image's subject within most windows: 4 pixels around CIFAR's 32, as is usual. Larger images
// bring a margin of their own.
Augmentation AugmentationFor(const TrainFlags& flags, const Dataset& data) {
  if (!flags.augment) return {};
  const int padding = data.margin > 0 ? data.margin : (std::min(data.height, data.width) + 7) / 8;
  return {.crop_padding = padding, .flip = data.mirrored_alike};
}

}  // namespace

Trainer::Trainer(ddp::ProcessGroup& group, const TrainFlags& flags, const Dataset& data, nn::Model& model,
                 Console& console, std::string environment, EnergyMeter* energy, ddp::Context* context)
    : context_(context),
      group_(&group),
      flags_(flags),
      data_(data),
      model_(model),
      device_(model.device()),
      console_(console),
      energy_(energy) {
  DivideData();
  std::random_device random;
  run_ = uint64_t{random()} << 32 | random() | 1;
  summary_.environment = std::move(environment);
  const size_t rows = static_cast<size_t>(flags.batch),
               row_bytes = (static_cast<size_t>(data.features()) + 1) * sizeof(float);
  evaluation_ = device_.AllocateHost(rows * row_bytes);
  const size_t micro_batches = static_cast<size_t>(flags.accumulate);
  if (!device_.is_host()) {
    for (auto& batch : uploaded_) batch = device_.Allocate(rows * micro_batches * row_bytes / sizeof(float));
  }
  const size_t losses = static_cast<size_t>(kLossSteps) * micro_batches;
  losses_memory_ = device_.AllocateHost(losses * sizeof(double));
  losses_ = static_cast<double*>(losses_memory_.get());
  loss_calls_ = device_.Allocate(sizeof(uint64_t) / sizeof(float));
  loss_ring_ = {losses_, reinterpret_cast<uint64_t*>(loss_calls_.get()), losses};
  hits_memory_ = device_.AllocateHost(sizeof(int64_t));
  timer_ = device_.MakeTimer();
}

// Again after a recovery: the group may have got smaller.
void Trainer::DivideData() {
  const SamplerOptions sampler = {.samples = data_.train.count(),
                                  .batch = static_cast<size_t>(flags_.batch) * static_cast<size_t>(flags_.accumulate),
                                  .rank = group_->rank(),
                                  .world_size = group_->size(),
                                  .seed = flags_.seed,
                                  .drop_last = flags_.drop_last};
  loader_.emplace(data_, sampler, AugmentationFor(flags_, data_), device_, flags_.loader_threads);
  evaluation_share_ = EvaluationShare(data_.test.count(), group_->rank(), group_->size());
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(ddp::ProcessGroup& group, const TrainFlags& flags,
                                                         const Dataset& data, nn::Model& model, Console& console,
                                                         std::string environment, EnergyMeter* energy,
                                                         ddp::Context* context) {
  std::unique_ptr<Trainer> trainer;
  absl::Status status = EndTogether(group, [&] {
    trainer.reset(new Trainer(group, flags, data, model, console, std::move(environment), energy, context));
    return trainer->Start();
  });
  if (!status.ok()) return trainer == nullptr ? status : trainer->EndAlike(std::move(status));
  return trainer;
}

Trainer::~Trainer() {
  try {
    device_.Wait();
  } catch (const nn::DeviceError&) {  // it does nothing any more
  }
  model_.Synchronize(nullptr);
}

bool Trainer::Finished() const { return progress_.step >= last_step_ || progress_.epoch >= flags_.epochs; }

absl::StatusOr<Summary> Trainer::Run() {
  absl::Status status = EndTogether(*group_, [this] { return RunEpochs(); });
  while (!status.ok() && !IsAgreed(status) && MayRecover()) {
    if (const absl::Status none = context_->Recover(); !none.ok()) {
      return absl::Status(none.code(), absl::StrCat("no recovery from \"", status.message(), "\": ", none.message()));
    }
    const int rank_before = group_->rank();
    group_ = &context_->world();
    status = EndTogether(*group_, [&] {
      const absl::Status ready = GoOn(rank_before);
      return ready.ok() ? RunEpochs() : ready;
    });
  }
  if (!status.ok()) return EndAlike(std::move(status));
  return summary_;
}

// The groups of a training are independent: nobody shall wait for this rank in the other one either.
absl::Status Trainer::EndAlike(absl::Status status) {
  if (sync_ != nullptr && !IsAgreed(status)) sync_->Abort(status);
  return status;
}

absl::Status Trainer::RunEpochs() {
  StartLoading();
  due_ = due_ || Finished();
  while (due_ || !Finished()) {
    if (!due_) {
      if (absl::Status status = RunEpoch(); !status.ok()) return status;
    }
    due_ = true;
    if (absl::Status status = Evaluate(); !status.ok()) return status;
    const bool trained = progress_.step > first_step_;
    if (trained) {
      if (absl::Status status = Save(); !status.ok()) return status;
      console_.Print(absl::StrFormat("epoch %d, step %d of %d: %s, test accuracy %.2f %%\n", EpochsBegun(),
                                     progress_.step, last_step_, LossText(summary_), 100 * summary_.test_accuracy));
    }
    due_ = false;
  }
  if (absl::Status status = FinishSaving(); !status.ok()) return status;
  if (absl::Status status = ExportWeights(); !status.ok()) return status;
  return Summarize();
}

void Trainer::StartLoading() {
  if (Finished()) return;
  const auto global_batch = static_cast<int64_t>(loader_->global_batch());
  loader_->Start(static_cast<uint64_t>(progress_.epoch), static_cast<size_t>(progress_.epoch_samples / global_batch));
}

absl::Status Trainer::RunEpoch() {
  const int64_t epoch = progress_.epoch;
  loss_sum_ = group_->rank() == 0 ? progress_.loss_sum : 0;
  loss_steps_ = group_->rank() == 0 ? progress_.loss_steps : 0;
  // A step lasts from the end of the one before to its own end, so that nothing between them is left out of the
  // figures.
  timer_->Mark(started_);
  if (energy_ != nullptr) energy_->Begin();
  while (progress_.epoch == epoch && progress_.step < last_step_) {
    if (energy_ != nullptr && started_ == measured_from_) energy_->Clear();
    // What was uploaded from the batch that is given back now has to have arrived.
    if (started_ > 0) device_.Await(Slot());
    const absl::StatusOr<Batch> batch = loader_->Next();
    if (!batch.ok()) return batch.status();
    if (absl::Status status = Step(*batch); !status.ok()) return status;
    Advance();
    if (progress_.epoch != epoch || progress_.step >= last_step_) {
      device_.Wait();
      TakeLosses(started_);
      TakeTimes(started_);
      StartLoading();  // the next epoch's batches, while this one is evaluated
    }
    const Clock::time_point now = Clock::now();
    console_.Step(now, progress_.step, last_step_, loss_sum_ / static_cast<double>(std::max<int64_t>(1, loss_steps_)));
    Watch(now);
    if (absl::Status status = AfterStep(); !status.ok()) return status;
  }
  if (energy_ != nullptr) energy_->End();
  return absl::OkStatus();
}

void Trainer::Watch(Clock::time_point now) {
  const auto period = flags_.monitor ? std::chrono::seconds(1) : std::chrono::seconds(60);
  if (energy_ != nullptr && energy_->Tick(now, period) && flags_.monitor) console_.Monitor(now, energy_->Line());
}

absl::Status Trainer::Step(const Batch& given) {
  ++started_;
  const Batch batch = device_.is_host() ? given : Upload(given, Slot());
  optimizer_->set_lr(FullLr() * ScheduleFactor(schedule_, progress_.step));
  const bool replayed = uses_graphs_ && started_ > eager_until_;
  absl::Status status = replayed ? Replay(batch) : Compute(batch, /*captured=*/false);
  if (!device_.is_host()) device_.Release(Slot());
  timer_->Mark(started_);
  TakeTimes(started_ - kStepsBehind);
  return status;
}

// Micro-batch after micro-batch; only the last one's backward pass is reduced. While a step is captured the ranks share
// no news: they do so in every replay.
absl::Status Trainer::Compute(const Batch& batch, bool captured) {
  for (int micro = 0; micro < flags_.accumulate; ++micro) {
    if (absl::Status status = replica_->BeginForward(); !status.ok()) return status;
    if (absl::Status status = Forward(batch, micro); !status.ok()) return status;
    if (micro + 1 == flags_.accumulate && !captured) {
      if (absl::Status status = BeginNews(); !status.ok()) return status;
    }
    if (absl::Status status = Backward(micro); !status.ok()) return status;
  }
  if (!captured) {
    if (absl::Status status = EndNews(); !status.ok()) return status;
  }
  return Update();
}

// The same as a graph, one for each piece of memory for batches. Everything in it has run before.
absl::Status Trainer::Replay(const Batch& batch) {
  std::unique_ptr<nn::Graph>& graph = graphs_[Slot()];
  if (graph == nullptr) {
    absl::Status status;
    graph = device_.Capture([&] {
      status = Compute(batch, /*captured=*/true);
      return status.ok();
    });
    if (!status.ok()) return status;
  }
  if (absl::Status status = BeginNews(); !status.ok()) return status;
  {
    const ddp::TraceScope scope(*group_, "replay");
    graph->Launch();
  }
  return EndNews();
}

// The steps that come next are not captured, and later ones anew.
void Trainer::ChooseGraphs() {
  for (std::unique_ptr<nn::Graph>& graph : graphs_) graph.reset();
  eager_until_ = started_ + kEagerSteps;
  uses_graphs_ = flags_.cuda_graph && WhyNoGraphs().empty();
}

std::string Trainer::WhyNoGraphs() const {
  if (device_.is_host()) return "steps run on the CPU; give --device=cuda";
  if (flags_.sync_bn && group_->size() > 1) return "--sync_bn exchanges sums in the middle of a step";
  const absl::Status status = replica_->CanCapture();
  return std::string(status.message());
}

absl::Status Trainer::BeginNews() {
  TakeLosses(device_.is_host() ? started_ : started_ - kStepsBehind);
  news_ = News();
  return notice_.has_value() ? notice_->Begin(news_) : absl::OkStatus();
}

absl::Status Trainer::EndNews() {
  if (notice_.has_value()) {
    const absl::StatusOr<int32_t> news = notice_->End();
    if (!news.ok()) return news.status();
    news_ = *news;
  }
  return news_ >= kNonFiniteLoss ? LossNotFinite(news_ - kNonFiniteLoss) : absl::OkStatus();
}

// A batch as the GPU has it. Release(slot) is to follow what reads it.
Batch Trainer::Upload(const Batch& batch, int slot) {
  float* const to = uploaded_[slot].get();
  const size_t floats = batch.labels.size() * static_cast<size_t>(data_.features());
  device_.UploadTo(slot, batch.pixels, to, (floats + batch.labels.size()) * sizeof(float));
  return {to, {reinterpret_cast<const int32_t*>(to + floats), batch.labels.size()}};
}

// One micro-batch, and its mean loss.
absl::Status Trainer::Forward(const Batch& batch, int micro) {
  const ddp::TraceScope scope(*group_, "forward");
  const ddp::Autocast autocast(ddp::Device::Kind::kCpu, AutocastType());
  const auto rows = static_cast<size_t>(flags_.batch);
  const size_t first = static_cast<size_t>(micro) * rows;
  const float* pixels = batch.pixels + first * static_cast<size_t>(data_.features());
  const absl::Span<const float> logits = model_.Forward(pixels, flags_.batch);
  const absl::Span<float> output_grad = model_.output_grad();
  device_.CrossEntropy(logits.data(), batch.labels.data() + first, flags_.batch, data_.classes, output_grad.data(),
                       {.label_smoothing = static_cast<float>(flags_.label_smoothing),
                        .grad_scale = 1.0f / static_cast<float>(flags_.accumulate),
                        .loss_scale = scaler_ == nullptr ? nullptr : scaler_->scale_data()},
                       loss_ring_);
  return absl::OkStatus();
}

void Trainer::TakeTimes(int64_t end) {
  while (timed_ < end) step_times_.Add(timer_->NsToMark(++timed_));
}

// Takes up the losses of this run's steps before `end`, which are done.
void Trainer::TakeLosses(int64_t end) {
  for (; taken_ < end; ++taken_) {
    const double* const losses = losses_ + taken_ % kLossSteps * flags_.accumulate;
    last_loss_ = std::accumulate(losses, losses + flags_.accumulate, 0.0) / flags_.accumulate;
    if (summary_.first_losses.size() < kFirstLosses) summary_.first_losses.push_back(last_loss_);
    if (!std::isfinite(last_loss_)) {
      loss_not_finite_ = true;
      continue;
    }
    loss_sum_ += last_loss_;
    ++loss_steps_;
  }
}

// What this rank has to tell the others beside the gradients.
int32_t Trainer::News() const {
  if (scaler_ == nullptr && loss_not_finite_) return kNonFiniteLoss + group_->rank();
  return writer_ != nullptr && writer_->failed() ? kSaveFailed : StopSignal();
}

absl::Status Trainer::Backward(int micro) {
  const bool last = micro + 1 == flags_.accumulate;
  {
    const ddp::TraceScope scope(*group_, "backward");
    replica_->Backward(/*first=*/micro == 0, last);
  }
  if (absl::Status status = replica_->FinishBackward(); !status.ok()) return status;
  // Replays are not measured; without them there is the warm-up only.
  if (last && !uses_graphs_) TakeCommunication();
  return absl::OkStatus();
}

void Trainer::TakeCommunication() {
  const int64_t step = started_ - measured_from_;
  if (!communication_times_.Wants(step)) return;
  const ddp::DdpStatistics statistics = replica_->statistics();
  communication_times_.Add(step, statistics.exposed_ns, statistics.communication_ns);
}

absl::Status Trainer::Update() {
  const ddp::TraceScope scope(*group_, "optimizer");
  if (scaler_ != nullptr) return UpdateScaled();
  optimizer_->Step(replica_->values(), replica_->grads());
  return absl::OkStatus();
}

// Averaged gradients are the same on all ranks, and so is what the scaler finds in them.
absl::Status Trainer::UpdateScaled() {
  const ddp::StepOptions options = {.stream = replica_->stream(), .skip_step = replica_->skip_step()};
  if (absl::Status status = scaler_->Step(*scaled_optimizer_, options); !status.ok()) return status;
  return scaler_->Update(replica_->stream());
}

void Trainer::Advance() {
  ++progress_.step;
  progress_.epoch_samples += static_cast<int64_t>(loader_->global_batch());
  EndEpochIfOver();
}

void Trainer::EndEpochIfOver() {
  if (progress_.epoch_samples < static_cast<int64_t>(loader_->batches() * loader_->global_batch())) return;
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
  if (!notice_.has_value()) return absl::CancelledError(what);  // the other ranks do not know
  if (flags_.save.empty()) return Agreed(absl::CancelledError(absl::StrCat(what, "; nothing is saved without --save")));
  if (absl::Status status = Save(); !status.ok()) return status;
  if (absl::Status status = FinishSaving(); !status.ok()) return status;
  return Agreed(absl::CancelledError(absl::StrCat(what, "; go on from there with --resume=", flags_.save)));
}

// What all ranks have learned from a sum of losses.
absl::Status Trainer::LostLoss() const {
  return Agreed(absl::OutOfRangeError(absl::StrCat("the training loss is not finite by step ", progress_.step,
                                                   "; give a lower --lr than ", progress_.lr, ", or --clip_norm")));
}

// Found before the step changed anything. Without notices the other ranks do not know.
absl::Status Trainer::LossNotFinite(int rank) const {
  const absl::Status why = absl::OutOfRangeError(
      absl::StrCat("the training loss is not finite ", device_.is_host() ? "in" : "by", " step ", progress_.step + 1,
                   " on rank ", rank, "; give a lower --lr than ", progress_.lr, ", or --clip_norm"));
  return notice_.has_value() ? Agreed(why) : why;
}

std::string Trainer::Plan() const {
  size_t numbers = 0;
  for (const nn::ParameterSpec& spec : model_.parameters()) numbers += spec.count();
  std::string plan = absl::StrFormat(
      "%d parameters; %s, learning rate %g; batch %d%s on each rank, %d in all; %s step %d of %d, seed %d", numbers,
      flags_.optimizer, FullLr(), flags_.batch, flags_.accumulate > 1 ? absl::StrCat(" x ", flags_.accumulate) : "",
      loader_->global_batch(), flags_.resume.empty() ? "from" : absl::StrCat("resumed from ", flags_.resume, " at"),
      progress_.step, last_step_, flags_.seed);
  if (flags_.no_ddp) absl::StrAppend(&plan, "; without DistributedDataParallel");
  if (flags_.reduce != "overlap") absl::StrAppend(&plan, "; --reduce=", flags_.reduce);
  if (uses_graphs_) absl::StrAppend(&plan, "; steps in CUDA graphs");
  if (flags_.cuda_graph && !uses_graphs_) absl::StrAppend(&plan, "; without a CUDA graph: ", WhyNoGraphs());
  if (sync_ != nullptr) absl::StrAppend(&plan, "; --sync_bn");
  return plan;
}

}  // namespace examples
