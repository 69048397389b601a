// SPDX-License-Identifier: Apache-2.0
// The training loop of the examples: epochs of steps, evaluation, checkpoints.
#ifndef EXAMPLES_TRAIN_TRAINER_H_
#define EXAMPLES_TRAIN_TRAINER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/autocast.h"
#include "ddp/context.h"
#include "ddp/grad_scaler.h"
#include "ddp/process_group.h"
#include "examples/data/dataset.h"
#include "examples/data/file.h"
#include "examples/nn/model.h"
#include "examples/nn/optimizer.h"
#include "examples/nn/sync_group.h"
#include "examples/train/agreement.h"
#include "examples/train/batch_loader.h"
#include "examples/train/checkpoint.h"
#include "examples/train/checkpoint_writer.h"
#include "examples/train/communication_times.h"
#include "examples/train/console.h"
#include "examples/train/durations.h"
#include "examples/train/energy.h"
#include "examples/train/flags.h"
#include "examples/train/flat_optimizer.h"
#include "examples/train/replica.h"
#include "examples/train/summary.h"

namespace examples {

// Trains one model on all ranks of a group. Every method is collective. If one rank fails, all ranks fail.
// Thread-safety: one thread at a time.
class Trainer {
 public:
  // Sets up the model with random parameters from flags.seed, or with the state in flags.resume. All ranks must have
  // the same flags. All arguments except the flags must outlive the trainer. The model must accept batches of
  // flags.batch. `environment` is that of rank 0, to be kept in checkpoints and the summary; see environment.h.
  // `energy`: null on all ranks, or on none. `context`: that of `group`, its world; flags.recover needs it.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(ddp::ProcessGroup& group, const TrainFlags& flags,
                                                         const Dataset& data, nn::Model& model, Console& console,
                                                         std::string environment = "", EnergyMeter* energy = nullptr,
                                                         ddp::Context* context = nullptr);

  // Waits for the GPU, which may still use the trainer's memory.
  ~Trainer();

  // Trains until flags.epochs or flags.steps is reached; saves and prints after each epoch. With flags.recover it goes
  // on in a new world when the group has failed, and says so in one line. When it returns, all files have been written.
  // If an error is not the same on all ranks, the group has been aborted. Cancelled: a signal asked a rank to stop, and
  // all ranks have stopped after the same step and saved it.
  absl::StatusOr<Summary> Run();

  // Returns one line that describes the training, to print.
  std::string Plan() const;

  Replica& replica() { return *replica_; }

 private:
  using Clock = Console::Clock;

  Trainer(ddp::ProcessGroup& group, const TrainFlags& flags, const Dataset& data, nn::Model& model, Console& console,
          std::string environment, EnergyMeter* energy, ddp::Context* context);

  void DivideData();
  absl::Status Start();
  absl::Status Synchronize();
  absl::Status EndAlike(absl::Status status);
  absl::Status RunEpochs();
  bool MayRecover() const;
  absl::Status GoOn(int rank_before);
  absl::Status CheckForProgress();
  void KeepBuffers();
  void RestoreBuffers();
  void ForgetStepsUnderWay();
  void MeasureAnew();
  absl::Status ShareState();
  void StepBack();
  absl::Status ShareNotices();
  absl::Status ClaimFiles(absl::Duration patience);
  void ChooseGraphs();
  absl::Status StartScaler();
  void PlanSteps();
  absl::Status Resume();
  absl::Status Load();
  absl::Status CheckResumed() const;
  void RescaleLosses();
  absl::Status BroadcastState();
  std::vector<Tensor> Weights();
  std::vector<Tensor> Tensors();
  absl::Span<float> OnHost(absl::Span<float> state);
  void Mirror(bool to_host);
  absl::Status ExportWeights();

  // The learning rate before the schedule.
  double FullLr() const { return progress_.lr * (flags_.lr_scale ? group_->size() : 1); }
  ddp::DType AutocastType() const { return flags_.amp == "bf16" ? ddp::DType::kBFloat16 : ddp::DType::kFloat32; }
  bool Reduces() const { return flags_.reduce != "none"; }
  bool Finished() const;
  void StartLoading();
  absl::Status AverageFirstLosses();
  int64_t EpochsBegun() const { return progress_.epoch + (progress_.epoch_samples > 0 ? 1 : 0); }
  absl::Status RunEpoch();
  absl::Status Step(const Batch& given);
  absl::Status Compute(const Batch& batch, bool captured);
  absl::Status Replay(const Batch& batch);
  // What stands against --cuda-graph; empty: nothing.
  std::string WhyNoGraphs() const;
  absl::Status BeginNews();
  absl::Status EndNews();
  // Of the step that was started last: its batch's memory on a GPU.
  int Slot() const { return static_cast<int>((started_ - 1) % nn::Device::kSlots); }
  Batch Upload(const Batch& batch, int slot);
  absl::Status Forward(const Batch& batch, int micro);
  void TakeTimes(int64_t end);
  void TakeLosses(int64_t end);
  int32_t News() const;
  absl::Status Backward(int micro);
  void TakeCommunication();
  absl::Status Update();
  absl::Status UpdateScaled();
  void Advance();
  void EndEpochIfOver();
  absl::Status AfterStep();
  absl::Status Stop(int signal);
  absl::Status Evaluate();
  absl::Status AwaitSteps();
  absl::Status LossNotFinite(int rank) const;
  // True if a GPU's step has made the parameters invalid: its losses are known only after its steps.
  bool LossIsLost() const { return scaler_ == nullptr && !device_.is_host() && loss_not_finite_; }
  absl::Status LostLoss() const;
  absl::Status Save();
  absl::Status FinishSaving();
  void Watch(Clock::time_point now);
  absl::Status Summarize();
  absl::Status SummarizeCost();

  ddp::Context* const context_;
  ddp::ProcessGroup* group_;
  const TrainFlags flags_;
  const Dataset& data_;
  nn::Model& model_;
  nn::Device& device_;
  Console& console_;
  EnergyMeter* const energy_;

  std::unique_ptr<nn::SyncGroup> sync_;  // with flags.sync_bn and more than one rank
  std::optional<BatchLoader> loader_;
  std::unique_ptr<Replica> replica_;
  std::unique_ptr<nn::Optimizer> optimizer_;
  // Null without flags.grad_scaler.
  std::unique_ptr<FlatOptimizer> scaled_optimizer_;
  std::unique_ptr<ddp::GradScaler> scaler_;
  Progress progress_;
  int64_t first_step_ = 0, last_step_ = 0;  // the numbers of steps at which this run begins and ends
  int64_t uncounted_steps_ = 0;             // that the optimizer has not counted, at the beginning of this run
  int64_t recovered_at_ = -1;               // the step from which the last recovery has gone on, or was to go on
  int recovered_size_ = 0;                  // and with how many ranks
  int vain_recoveries_ = 0;                 // in a row
  bool half_taken_over_ = false;  // the state is neither this rank's nor that of the rank that was to share it
  bool due_ = false;              // an evaluation, and a checkpoint of an epoch or of the end
  Schedule schedule_;
  // Of the layers, as all ranks had them at the last evaluation or the start; with flags.recover.
  std::vector<std::vector<float>> kept_buffers_;

  // The number that ranks share in each step: kNonFiniteLoss and a rank, kSaveFailed, the number of a signal, or 0.
  std::optional<StepNotice> notice_;          // none if the ranks train independently
  int32_t news_ = 0;                          // the number shared in the last step
  uint64_t run_ = 0;                          // tells the ranks of this run from other processes; random
  std::unique_ptr<CheckpointWriter> writer_;  // on rank 0, with flags.save
  std::unique_ptr<AtomicFile> exported_;      // on rank 0, with flags.export_weights

  // The memory of one evaluation batch, laid out as in Batch; and on a GPU, the memory for uploaded batches, and the
  // steps on each of them, after the first kEagerSteps in a group: those choose and load kernels, connect ranks, and
  // teach the library the order of gradients.
  std::shared_ptr<void> evaluation_;
  std::shared_ptr<float> uploaded_[nn::Device::kSlots];
  static constexpr int64_t kEagerSteps = 3;
  static constexpr size_t kFirstLosses = 20;  // see Summary::first_losses
  int64_t eager_until_ = kEagerSteps;         // counted like started_; a recovery puts it off
  bool uses_graphs_ = false;
  std::unique_ptr<nn::Graph> graphs_[nn::Device::kSlots];
  // On a GPU: host copies of the state that rank 0 reads and writes. The key is the address on the GPU.
  std::map<float*, std::vector<float>> mirrors_;

  // The GPU writes these while the host continues; the host reads them when it has to wait anyway: the losses of the
  // last kLossSteps steps, one per micro-batch, and the number of correct images of an evaluation.
  static constexpr int64_t kLossSteps = 4;
  std::shared_ptr<void> losses_memory_, hits_memory_;
  double* losses_ = nullptr;
  std::shared_ptr<float> loss_calls_;  // counted by the device
  nn::LossRing loss_ring_{nullptr};
  // A GPU has done the steps before the two that it may still have uploaded for.
  static constexpr int64_t kStepsBehind = nn::Device::kSlots + 1;
  int64_t started_ = 0;               // steps started in this run
  std::unique_ptr<nn::Timer> timer_;  // moment n: the end of step n of this run
  int64_t timed_ = 0;                 // steps of this run whose times are in step_times_
  int64_t taken_ = 0;                 // steps of this run whose losses are in loss_sum_
  double last_loss_ = 0;              // the last loss added
  bool loss_not_finite_ = false;      // one of the added losses was not finite

  // This rank's values since the start of the epoch. On rank 0 they include the steps before a checkpoint of this
  // epoch.
  double loss_sum_ = 0;
  int64_t loss_steps_ = 0;
  // This rank's times of the steps of this run, or of those since a recovery has changed the number of ranks; without
  // the warm-up, which ends before step measured_from_, counted like started_.
  int64_t measured_from_ = flags_.warmup;
  Durations step_times_{flags_.warmup};
  CommunicationTimes communication_times_{device_.is_host() ? 0 : kStepsBehind};

  std::vector<uint32_t> evaluation_share_;
  Summary summary_;
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_TRAINER_H_
