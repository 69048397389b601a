// Averages gradients over ranks while the backward pass is still running.
#ifndef DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/comm_hook.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

class GradScaler;

// One trainable tensor. `name` is unique in the model. `shape` is compared between ranks if given; its product is
// value.count.
//   value.data null: the library owns the memory (see DistributedDataParallel::value).
//   grad.data null:  the library owns the gradient, in memory that the group reduces in place (fastest; the usual
//                    case). Its count, dtype and device are value's. (Not so with DdpOptions::copy_gradients.)
//   grad.data set:   the gradient lives in the caller's memory and has value's count; its dtype may differ. It is
//                    copied for the reduction, and back.
//   frozen:          not trained at present: it has a value, but no gradient is announced or reduced.
struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  Buffer value;
  Buffer grad;
  bool frozen = false;
};

// A part of the model that is no parameter, like the running statistics of a batch norm. Any dtype; the memory is the
// caller's.
struct ModelBuffer {
  std::string name;
  Buffer data;
};

// What a parameter without a gradient in a reduced step means.
enum class UnusedParameters : uint8_t {
  kError,   // a mistake: FinishBackward names it and the rank
  kDetect,  // it was not used: it contributes zeros, and where no rank used it its gradient is left as it is
};

struct DdpOptions {
  // bucket_bytes: chosen at Create by a model of the group's latency and bandwidth, measured there (docs/concepts.md).
  static constexpr size_t kAutoBucketBytes = SIZE_MAX;
  static constexpr size_t kDefaultBucketBytes = size_t{25} << 20;

  // Gradients are reduced in buckets of about this size, the first one smaller so that reduction begins early. A
  // gradient is never split. A cap set by the user applies to the first bucket too unless that is set as well: 0 means
  // 1 MiB, or bucket_bytes where it is not the default.
  size_t bucket_bytes = kDefaultBucketBytes;
  size_t first_bucket_bytes = 0;

  // A bucket is handed to the group in operations of at most this size, so that a backend that copies data through
  // stages can overlap them. 0: whole. Not used with a hook.
  size_t piece_bytes = 0;

  // Buckets follow the order in which gradients became ready in the first reduced step, as rank 0 saw it; looked at
  // again after steps 10, 100, 1000 and every 1000 more, and changed where the order has drifted. No gradient moves.
  bool replan = true;

  // kAvg (the default) or kSum.
  ReduceOp op = ReduceOp::kAvg;

  // Ranks count by the weight they give with SetWeight, for batches of unequal size: kAvg is the weighted mean, kSum
  // the weighted sum. Costs a pass over the gradients on ranks whose weight is not the largest (kSum: not 1).
  bool weighted = false;

  // Gradients are divided by this before they are summed and multiplied after (with the division of the mean), which
  // keeps sums of 16-bit floats in range on backends that form them in 16 bits.
  double gradient_predivide_factor = 1;

  // 16-bit gradients are summed in float32 and rounded once. Backends of one host do that anyway; elsewhere, and for
  // hooks, gradients are copied to float32 and back.
  bool reduce_in_float32 = false;

  // If set, 1 is stored there in a step, before FinishBackward returns, where a reduced gradient has an infinity or a
  // NaN; otherwise it is left alone. Equal on all ranks. The check rides on the reduction. Set on all ranks or on none.
  // On a GPU: memory that it can write, and in the order of FinishBackward's stream.
  uint32_t* nonfinite = nullptr;

  UnusedParameters unused = UnusedParameters::kError;

  // Each rank uses the same parameters in every step as in its first. What that step does not use is found out there
  // as by kDetect; no later step pays for it, and one that deviates ends with an error.
  bool static_graph = false;

  // Gradients are the program's own (a framework's, say): given as Parameter::grad, or by SetGrad before they are
  // announced. They are copied for the reduction and back.
  bool copy_gradients = false;

  // Copy rank 0's parameters to all ranks at Create.
  bool broadcast_parameters = true;

  // Copied from rank 0 at Create and, if broadcast_buffers, by every BeginForward.
  std::vector<ModelBuffer> buffers;
  bool broadcast_buffers = true;

  // How buckets are communicated; null: by an all-reduce.
  std::shared_ptr<CommHook> hook;
};

// Times of one bucket in the last step, in nanoseconds since the step's first GradReady. `done` is when this rank saw
// the reduction finished. On a GPU they are the GPU's, by events, of the last step that was measured: of one in 16, or
// with an observer of as many as it gets done with; ready and launched are then when the bucket's last gradient was
// there.
struct BucketTimes {
  size_t bytes = 0;
  size_t gradients = 0;
  size_t ranges = 0;        // stretches of memory that they make up
  size_t operations = 0;    // handed to the group: one, or several for pieces and hooks
  int64_t ready_ns = 0;     // its last gradient was announced here
  int64_t launched_ns = 0;  // its reduction was handed to the group
  int64_t done_ns = 0;
};

struct DdpStatistics {
  int64_t steps = 0;                 // reduced steps so far
  int64_t plans = 0;                 // times that buckets were planned: 1, and once more for every change
  std::vector<BucketTimes> buckets;  // of the last reduced step, in launch order
  // Of the last reduced step: communication that backward did not hide. The time in FinishBackward; on a GPU, the time
  // that its stream waited.
  int64_t exposed_ns = 0;
  // Of the last reduced step: time in which at least one bucket was launched and not done.
  int64_t communication_ns = 0;
  double overlap = 0;  // of all steps: 1 - sum(exposed) / sum(communication), 0 to 1; 0 if nothing was communicated
};

struct JoinOptions {
  // Means are taken over the ranks that still have inputs; otherwise over all, those that are through counting as
  // zeros. With DdpOptions::weighted it is over the weights of those that have inputs in any case.
  bool divide_by_active = false;
  // Instead of going on without it, every rank gets an error when one has no more inputs: OutOfRange from
  // FinishBackward, BeginForward and Join::Finish.
  bool throw_on_early = false;
  // The scaler of the training, whose scale and counters a rank that is through does not adapt: Finish gives all ranks
  // those of the rank that went on longest (GradScaler::Broadcast). Set on all ranks or on none. Outlives the Join.
  GradScaler* scaler = nullptr;
  // Called on a rank that has no more inputs after each step of the others, when gradients hold that step's result: for
  // what has to stay equal on all ranks, like the optimizer's step count. An error ends the training on every rank.
  std::function<absl::Status()> on_shadowed_step;
};

// One model's gradients and their reduction. See docs/concepts.md for the life of a step.
//
//   auto model = ddp::DistributedDataParallel::Create(context->world(), parameters);
//   for (...) {
//     Forward();
//     for (int i = last; i >= 0; --i) { WriteGradient(i, (*model)->grad(i)); (*model)->GradReady(i); }
//     absl::Status s = (*model)->FinishBackward();   // gradients are now averages over all ranks
//     OptimizerStep();
//   }
//
// Requires: the same parameters in the same order on all ranks (checked at Create), and the same sequence of reduced
// steps. The group outlives the model (see Rebind). Between GradReady(i) and FinishBackward gradient i belongs to the
// library.
//
// Thread-safety: GradReady may be called from any thread and concurrently; everything else from one thread at a time.
class DDP_EXPORT DistributedDataParallel {
 public:
  // Collective. Verifies that all ranks have the same parameters, options and hook (FailedPrecondition names the first
  // difference and the ranks), allocates what the library owns, plans buckets in reverse order of `parameters`, and
  // broadcasts rank 0's values. InvalidArgument: no parameters, a name used twice, a shape that contradicts the count,
  // memory given twice, an option out of range.
  static absl::StatusOr<std::unique_ptr<DistributedDataParallel>> Create(ProcessGroup& group,
                                                                         std::vector<Parameter> parameters,
                                                                         const DdpOptions& options = {});

  // In the middle of a step it aborts the group, so that the peers do not wait for what will not come.
  virtual ~DistributedDataParallel() = default;

  // Index is that of the parameter in Create. Addresses never change in the model's life.
  virtual size_t size() const = 0;
  virtual const Parameter& parameter(size_t index) const = 0;  // pointers filled in
  virtual Buffer value(size_t index) const = 0;
  virtual Buffer grad(size_t index) const = 0;

  // Calls fn(index, parameter) for every parameter that is not frozen: for optimizers that take one tensor at a time.
  void ForEachGrad(const std::function<void(size_t index, const Parameter& parameter)>& fn) const {
    for (size_t i = 0; i < size(); ++i) {
      if (!parameter(i).frozen) fn(i, parameter(i));
    }
  }

  // The gradients that the library owns, as one range per dtype in memory order (reverse parameter order, each gradient
  // at a multiple of 256 bytes, zeros between), and the values it owns with the same layout. Parameters that were added
  // later lie in further ranges; gradients of removed and frozen ones are zeros.
  virtual absl::Span<const Buffer> grad_spans() const = 0;
  virtual absl::Span<const Buffer> value_spans() const = 0;

  // Before the forward pass: copies rank 0's buffers (DdpOptions::buffers) to all ranks, in one operation. Does nothing
  // without buffers, or within an accumulation (where the last backward was not reduced).
  virtual absl::Status BeginForward(Stream stream = {}) = 0;

  // Announces that gradient `index` has been written for this step (on a GPU: that what writes it has been submitted to
  // `stream`; without one, that it has been written). When the last gradient of a bucket is announced,
  // and all earlier buckets have been launched, its reduction starts. Misuse (an index out of range, a gradient
  // announced twice, of a frozen parameter, without memory) is remembered and returned by FinishBackward.
  virtual void GradReady(size_t index, Stream stream = {}) noexcept = 0;

  // Tells where gradient `index` of the caller's lives from now on: before its GradReady, for frameworks that allocate
  // gradients anew in each step. Count, dtype and device as before (InvalidArgument names the parameter and the rank).
  // FailedPrecondition for a gradient that the library owns.
  virtual absl::Status SetGrad(size_t index, Buffer grad) = 0;

  // Ends the step: waits for all reductions; on a GPU makes `stream` wait for them, and the host does not wait.
  // (Without a stream the host does.) What fails after it has returned is told by skip_step(), and by the next call.
  // Returns what went wrong in it, on every rank: FailedPrecondition naming
  // the parameters that this rank did not announce; Aborted with that cause on the others (in their next step, where
  // they were through with this one).
  virtual absl::Status FinishBackward(Stream stream = {}) = 0;

  // On a GPU: a word in its memory. Behind FinishBackward, in the order of its stream, it is not 0 if the step's
  // gradients must not be used: a reduction failed, perhaps after FinishBackward had returned, or DdpOptions::nonfinite
  // says so. For StepOptions::skip_step; an optimizer that does not look at it has to be called after a FinishBackward
  // without a stream. Null on the CPU. As long-lived as the model.
  virtual const uint32_t* skip_step() const = 0;

  // Sets all gradients to zero.
  virtual void ZeroGrad(Stream stream = {}) = 0;

  // This rank's weight in the steps that begin from now on (DdpOptions::weighted), for example its number of samples;
  // 1 at first. Above 0 on some rank, finite, not negative: a bad one is returned by FinishBackward. A rank of weight 0
  // contributes zeros, whatever its gradients are.
  virtual void SetWeight(double weight) = 0;

  // The norm of all gradients together, of order 1, 2 or infinity, computed in float64 in one pass. After
  // FinishBackward it has the same bits on every rank. InvalidArgument for another order.
  // On a GPU: of what the gradients are in the order of `stream`, which the host waits for; without a stream, of what
  // they are after a FinishBackward without one.
  virtual absl::StatusOr<double> GradNorm(double order = 2, Stream stream = {}) = 0;

  // Scales all gradients by max_norm / (norm + 1e-6) where that is below 1, and returns the norm they had. A norm that
  // is not finite is returned with the gradients as they are.
  virtual absl::StatusOr<double> ClipGradNorm(double max_norm, double order = 2, Stream stream = {}) = 0;

  // Collective, between steps: trains these parameters from now on, each told by its name. Those that the model had
  // keep their memory and addresses (pointers given for them are ignored); new ones get memory and rank 0's values;
  // those left out are forgotten. So to freeze parameters, or add some. Indices count in the new list. Within an
  // accumulation, gradients stay as they are, and what was announced stays announced, except for parameters that are
  // frozen. Errors as for Create; the model is then as it was.
  virtual absl::Status SetParameters(std::vector<Parameter> parameters) = 0;

  // While one lives, backward passes that begin are not reduced: gradients stay local, and FinishBackward only ends the
  // step. The backward pass reads it once, at its first GradReady. Reduction happens in the first backward that begins
  // after the last NoSync is gone.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(DistributedDataParallel& model) : model_(model) { model_.ChangeNoSync(+1); }
    ~NoSync() { model_.ChangeNoSync(-1); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DistributedDataParallel& model_;
  };

  // The same for loops that know which micro-batch is the last: backward passes that begin while it is false are not
  // reduced. True at first.
  virtual void SetIsLastMicrobatch(bool is_last) = 0;

  // For ranks with unequal numbers of steps. All ranks make one, take their steps, and call Finish when they have no
  // more inputs: a rank that is through then takes part in the others' reductions until all are. At the end all have
  // the parameters and buffers of the ranks that went on longest, and with JoinOptions::scaler its scale. Costs a small
  // exchange at the start of every step.
  //
  //   ddp::DistributedDataParallel::Join join(*model);
  //   while (NextBatch()) { ...one step... }
  //   absl::Status s = join.Finish();
  //
  // One that is destroyed without Finish aborts the group, so that nobody waits for this rank.
  class [[nodiscard]] Join {
   public:
    explicit Join(DistributedDataParallel& model, JoinOptions options = {}) : model_(model) {
      model_.BeginJoin(std::move(options));
    }
    ~Join() { model_.LeaveJoin(); }
    Join(const Join&) = delete;
    Join& operator=(const Join&) = delete;

    absl::Status Finish() { return model_.FinishJoin(); }

   private:
    DistributedDataParallel& model_;
  };

  virtual DdpStatistics statistics() = 0;

  // Goes on in another group: after a failure, in that of the survivors (Context::NewGroup). Collective over `group`,
  // which outlives the model from now on; the earlier one may go. Checks that all its ranks have the same model, and
  // registers the gradients' memory there. Addresses stay; values and gradients are left as they are, so make them
  // equal: SyncState. What steps have taught is forgotten, as the last of them may have ended on some ranks only:
  // buckets are planned as at Create, hooks begin anew (CommHook::Reset), and all ranks count the steps that rank 0 has
  // made. A step that was under way is dropped: its gradients are worthless. FailedPrecondition in the middle of a step
  // of a group that works. After another error call it again, with a group that works.
  virtual absl::Status Rebind(ProcessGroup& group) = 0;

 private:
  virtual void ChangeNoSync(int delta) = 0;
  virtual void BeginJoin(JoinOptions options) = 0;
  virtual absl::Status FinishJoin() = 0;
  virtual void LeaveJoin() = 0;
};

}  // namespace ddp

#endif  // DDP_DISTRIBUTED_DATA_PARALLEL_H_
