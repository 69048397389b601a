// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel as it is: announcements, and what a step consists of beside its buckets. The parts are in
// model.cc (creation, parameters), step.cc (a step), unused.cc (parameters without gradients), replicas.cc (equal
// values), join.cc (unequal ranks) and norm.cc.
#ifndef LIBDDP_REDUCER_MODEL_H_
#define LIBDDP_REDUCER_MODEL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ddp/distributed_data_parallel.h"
#include "libddp/base/owner_process.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/grad_streams.h"
#include "libddp/reducer/graph_steps.h"
#include "libddp/reducer/memory.h"
#include "libddp/reducer/nan_check.h"
#include "libddp/reducer/reducer.h"
#include "libddp/reducer/replica_check.h"
#include "libddp/reducer/statistics.h"
#include "libddp/reducer/step_note.h"

namespace ddp {

class Model final : public DistributedDataParallel {
 public:
  // The parameters will be on `device`.
  Model(ProcessGroup& group, Device device, const DdpOptions& options);
  ~Model() override;

  // Collective; the parameters and options have been verified.
  absl::Status Build(std::vector<Parameter> parameters);

  size_t size() const override { return all_.size(); }
  const Parameter& parameter(size_t index) const override { return all_[index].parameter; }
  Buffer value(size_t index) const override { return all_[index].parameter.value; }
  Buffer grad(size_t index) const override { return all_[index].parameter.grad; }
  absl::Span<const Buffer> grad_spans() const override { return memory_->grad_spans(); }
  absl::Span<const Buffer> value_spans() const override { return memory_->value_spans(); }
  absl::Status BroadcastValues(int root, Stream stream) override;
  absl::Status SetParameters(std::vector<Parameter> parameters) override;

  absl::Status BeginForward(Stream stream) override;
  void GradReady(size_t index, Stream stream) noexcept override;
  absl::Status SetGrad(size_t index, Buffer grad) override;
  absl::Status FinishBackward(Stream stream) override;
  const uint32_t* skip_step() const override { return static_cast<const uint32_t*>(skip_step_.get()); }
  void Watch(ProcessGroup& group) override;
  void ZeroGrad(Stream stream) override;
  void SetWeight(double weight) override { weight_ = weight; }
  absl::StatusOr<double> GradNorm(double order, Stream stream) override;
  absl::StatusOr<double> ClipGradNorm(double max_norm, double order, Stream stream) override;
  absl::StatusOr<const double*> ClipGradNormAsync(double max_norm, double order, Stream stream) override;
  DdpStatistics statistics() override;
  absl::Status CanCapture() const override;
  absl::Status Rebind(ProcessGroup& group) override;

  // For the C interface, which can tell at once what Join's constructor cannot: whether a Join would be refused now.
  absl::Status CanJoin() const;

 private:
  // What becomes of a parameter in a reduced step.
  enum class Role : uint8_t {
    kTrained,
    kIdle,    // static graph: this rank does not use it, another does
    kUnused,  // static graph: no rank uses it; it is in no bucket
    kFrozen,
  };
  // How a parameter has been announced.
  static constexpr uint8_t kNow = 1;    // in this backward
  static constexpr uint8_t kSince = 2;  // in this one, or in one since the last reduction
  static constexpr uint8_t kHeld = 4;   // since the last reduction, and not zeroed since

  void ChangeNoSync(int delta) override { no_sync_ += delta; }
  uint64_t BeginJoin(JoinOptions options) override;
  absl::Status FinishJoin(uint64_t ticket) override;
  void LeaveJoin(uint64_t ticket) override;

  // Creation and parameters.
  void Abandon();
  void LeaveGpu();
  absl::Status PrepareGpu();
  absl::Status Adopt(std::vector<Trained> all, absl::Span<const uint8_t> announced);
  absl::Status Take(std::vector<Trained> all, absl::Span<const uint8_t> announced);
  // A list of parameters, and what steps have taught about it.
  struct Former {
    ModelMemory memory;
    std::vector<Trained> all;
    std::vector<uint8_t> announced;
    std::vector<Role> roles;
    std::vector<size_t> order;  // of the buckets' items
    bool static_known;
    int64_t steps_of_list;
  };
  Former KeepList() const;
  absl::Status GoBack(Former former, absl::Status why);
  absl::Status PlanAfresh();
  absl::Status ChooseCaps();
  absl::Status Plan(absl::Span<const size_t> order);
  absl::Status Broadcast(absl::Span<const Buffer> buffers, int root, Stream stream = {});
  std::vector<Buffer> ValuesAndBuffers() const;
  void WarnOfLostGradients() const;

  // The step, with the mutex held.
  void BeginStep(Stream stream);
  void BeginReduction(Stream stream);
  absl::Status ZeroIdle(Stream stream);
  void TryAdvance(Stream stream);
  void Arrive(size_t index);
  void Misused(absl::string_view what, absl::StatusCode code = absl::StatusCode::kFailedPrecondition);
  absl::Status CheckBetweenSteps(absl::string_view call) const;
  absl::Status CheckStreamOf(absl::string_view call, Stream stream) const;
  // The stream that a call works on; see GradStreams.
  absl::StatusOr<Stream> Follow(absl::string_view call, Stream stream);
  absl::Status Named(absl::string_view call, const absl::Status& error) const { return NameRank(*group_, call, error); }
  void GiveUp(const absl::Status& why);
  absl::Status Reduce(Stream stream);
  absl::Status Communicate(Stream stream);
  void CopyIn(size_t index, Stream stream);
  absl::Status CopyInBucket(const Bucket& bucket, Stream stream);
  absl::Status CopyGradients(absl::Span<const size_t> indices, bool in, Stream stream);
  absl::Status CopyOutDone(Stream stream);
  absl::Status CheckGivenGradients();
  absl::Status UseStandIn(size_t index);
  void ForgetGivenGradients();
  absl::Status FinishOnGpu(Stream stream);
  absl::Status StatusOfWatched() const;
  void Record(MeasuredStep step);
  MeasuredStep TimesOfStep(int64_t exposed_ns) const;
  void ReadTimer();
  absl::StatusOr<bool> Capturing(Stream stream) const;
  absl::Status Capturable() const;
  // Reduced steps, with the replays that have ended by now. Other ranks may know of another number.
  int64_t StepsSoFar() const { return statistics_.steps() + graph_steps_.replays(); }
  void ForgetPasses();
  absl::Status EndReduction();
  void EndStep();
  bool ReplanDue() const;
  std::vector<size_t> ObservedOrder(bool looked) const;
  absl::Status Replan(bool must);

  // Unused parameters.
  bool MayBeUnused() const { return options_.unused == UnusedParameters::kDetect || options_.static_graph; }
  bool Detecting() const { return MayBeUnused() && !static_known_; }
  absl::Status Settle(Stream stream);
  absl::Status MissingError(absl::Span<const size_t> missing) const;
  std::string Names(absl::Span<const size_t> parameters) const;
  void WarnOfUnused() const;
  absl::Status LeaveOut(size_t index, Stream stream);
  absl::Status StartUsedMap();
  absl::Status FinishUsedMap(Stream stream);
  bool RecordStaticGraph();

  // Replicas.
  absl::Status BeginReplicaCheck(Stream stream);
  absl::Status TellFinding();
  absl::Status FinishReplicaCheck(absl::FunctionRef<bool()> give_up = [] { return false; });

  // Infinities and NaN.
  absl::Status FinishNanCheck();

  // Unequal ranks.
  absl::string_view AgainstJoin() const;
  absl::Status JoinLasts(absl::string_view call) const;
  bool Meets() const { return options_.weighted || join_.has_value(); }
  absl::Status StartMeeting(StepNote::Kind kind);
  absl::Status FinishMeeting();
  void SetScale();
  absl::Status ShadowStep();
  absl::Status TakeResult(int giver);
  absl::Status ShadowOthers(std::unique_lock<std::mutex>& lock);

  std::vector<Buffer> Gradients() const;
  absl::Status CheckMaxNorm(absl::string_view call, double max_norm) const;
  absl::StatusOr<NormKind> KindOf(absl::string_view call, double order) const;

  ProcessGroup* group_;
  std::vector<ProcessGroup*> watched_;
  const DdpOptions options_;
  const Device device_;
  GradStreams streams_;
  std::shared_ptr<void> skip_step_;    // on a GPU
  std::shared_ptr<ClipNumbers> clip_;  // on the device
  std::unique_ptr<ModelMemory> memory_;
  Reducer reducer_;
  Reducer::Caps caps_;
  std::vector<Trained> all_;  // by parameter
  std::vector<Role> roles_;   // by parameter

  // The step. GradReady touches the atomics from any thread.
  std::unique_ptr<std::atomic<uint8_t>[]> announced_;  // by parameter: kNow, kSince, kHeld
  std::atomic<bool> in_step_{false};
  std::atomic<bool> reducing_{false};   // of this step: whether it is reduced at all
  std::atomic<bool> observing_{false};  // of this step: whether the order of announcements is written down
  std::atomic<int> no_sync_{0};
  std::atomic<bool> grads_given_{false};  // SetGrad has been called since the last reduction
  std::vector<uint32_t> order_;           // parameters as they were announced in this step
  std::atomic<size_t> order_size_{0};
  const OwnerProcess owner_;
  mutable std::mutex mutex_;
  int64_t begin_ns_ = 0;
  size_t copied_out_ = 0;        // buckets of this step whose gradients are back where they belong
  absl::Status misuse_;          // the first of this step
  bool agreed_failure_ = false;  // all ranks know of it: no reason to abort
  bool last_was_reduced_ = true;
  int64_t steps_of_list_ = 0;  // reduced steps with the present list of parameters
  Statistics statistics_;
  GraphSteps graph_steps_;
  bool capturing_ = false;  // this step, into a graph

  // Unused parameters.
  std::vector<size_t> left_out_;                  // in this step, here; ascending
  std::vector<std::optional<StreamArray>> kept_;  // what their gradients were, if those are the library's
  std::vector<uint8_t> used_map_;                 // by parameter: some rank used it
  Work used_work_;
  bool static_known_ = false;  // all ranks know what each of them uses

  // Replicas.
  ReplicaCheck replicas_;
  NanCheck nan_check_;
  absl::Status finding_;  // of a check, the same on all ranks: this step will return it

  // Unequal ranks.
  std::atomic<double> weight_{1};
  std::optional<JoinOptions> join_;
  uint64_t join_ticket_ = 0;  // of the last Join
  bool join_over_ = false;
  bool shadowing_ = false;  // this step is one of the others, and this rank through
  StepNote::Result result_ = StepNote::kNone;
  StepNote note_;
  std::vector<StepNote> notes_;
  Work meeting_work_;
  std::optional<Meeting> meeting_;  // of this step
  int last_active_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_MODEL_H_
