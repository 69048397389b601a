// SPDX-License-Identifier: Apache-2.0
// Averages gradients over ranks while the backward pass is still running.
#ifndef DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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

// One trainable tensor. `name` is unique in the model. `shape` is optional; if given, its product is value.count, and
// ranks compare it.
//   - value.data null: the library owns the memory (see DistributedDataParallel::value).
//   - grad.data null: the library owns the gradient, in memory that the group reduces in place. This is the usual and
//     fastest case. Count, dtype and device are those of value. (DdpOptions::copy_gradients changes this.)
//   - grad.data set: the caller owns the gradient. Its count is that of value; its dtype may differ. If it is inside an
//     allocation of the group (ProcessGroup::Allocate or Register), at the same place on every rank, it is reduced in
//     place, whatever is around it, and the model keeps the allocation alive. Other memory is copied for the reduction,
//     and back.
//   - frozen: not trained at present. It has a value, but its gradient is neither announced nor reduced.
struct Parameter {
  std::string name = {};            // unique in the model
  std::vector<int64_t> shape = {};  // optional
  Buffer value = {};                // the tensor itself
  Buffer grad = {};                 // its gradient; usually left to the library
  bool frozen = false;              // not trained at present
};

// State of the model that is no parameter, such as the running statistics of a batch norm. Any dtype; the caller owns
// the memory, of which no byte belongs to another buffer or to a parameter.
struct ModelBuffer {
  std::string name = {};  // unique in the model
  Buffer data = {};       // its memory
  // Equal on all ranks at the end of every backward pass (a table, a counter, synchronised statistics).
  // DdpOptions::check_replicas then compares it. Leave it false for running statistics of each rank's own batch.
  bool replicated = false;
};

// The meaning of a parameter without a gradient in a reduced step.
enum class UnusedParameters : uint8_t {
  kError,   // an error: FinishBackward names the parameter and the rank
  kDetect,  // not used: it contributes zeros; if no rank used it, its gradient does not change
};

// How a model's gradients are reduced. The defaults are fine for most programs. All ranks use the same.
struct DdpOptions {
  // For bucket_bytes: Create measures the group's latency and bandwidth and computes the size (docs/concepts.md).
  static constexpr size_t kAutoBucketBytes = SIZE_MAX;
  // 25 MiB, as in PyTorch.
  static constexpr size_t kDefaultBucketBytes = size_t{25} << 20;

  // The approximate size of a bucket in bytes. The first bucket is smaller, so that reduction starts early. The last
  // ones are smaller too, because little of the backward pass is left to hide them: each is about half of the one
  // before, and the last one has once or twice first_bucket_bytes. Over NCCL, where an operation takes the host longer,
  // they are not. If both sizes are equal, all buckets have this size. A gradient is never split.
  // first_bucket_bytes = 0: 1 MiB if bucket_bytes is the default, the smaller of 1 MiB and the measured size with
  // kAutoBucketBytes, otherwise bucket_bytes.
  size_t bucket_bytes = kDefaultBucketBytes;
  size_t first_bucket_bytes = 0;  // 0: see above

  // Reduces a bucket in operations of at most this many bytes, so that a backend that copies data through stages can
  // overlap them. 0: in one operation. Not used with a hook.
  size_t piece_bytes = 0;

  // If true, buckets follow the order in which gradients became ready on rank 0 in the first reduced step. The order is
  // checked again after steps 10, 100, 1000 and every further 1000, and buckets change if it has drifted. No gradient
  // moves.
  bool replan = true;

  // kAvg (the default) or kSum.
  ReduceOp op = ReduceOp::kAvg;

  // For batches of different sizes: each rank has the weight that it set with SetWeight. kAvg is the weighted mean,
  // kSum the weighted sum. Costs a pass over the gradients on ranks whose weight is not the largest (kSum: not
  // gradient_predivide_factor).
  bool weighted = false;

  // Gradients are divided by this factor before the sum and multiplied by it afterwards (together with the division of
  // the mean). This keeps sums of 16-bit floats in range on backends that add them in 16 bits.
  double gradient_predivide_factor = 1;

  // Adds 16-bit gradients in float32 and rounds once. Backends of one host always do this. Otherwise, and for hooks, it
  // copies the gradients to float32 and back.
  bool reduce_in_float32 = false;

  // If set, the step stores 1 there, before FinishBackward returns, if a reduced gradient in its own type contains an
  // infinity or a NaN. Otherwise the word does not change. Equal on all ranks. The reduction does the check, so it
  // needs no separate pass. Set it on all ranks or on none. On a GPU: memory that the GPU can write; it is written in
  // the order of FinishBackward's stream.
  uint32_t* nonfinite = nullptr;

  // The meaning of a parameter without a gradient in a reduced step.
  UnusedParameters unused = UnusedParameters::kError;

  // Promises that each rank uses the same parameters in every step as in its first. The first step detects the unused
  // ones, like kDetect. Later steps have no cost for it, and a step that differs ends with an error. In a Join, all
  // steps up to the first one that every rank takes detect them.
  bool static_graph = false;

  // The program, for example a framework, owns the gradients. It passes them as Parameter::grad, or calls SetGrad
  // before it announces them. They are copied for the reduction, and back.
  bool copy_gradients = false;

  // Copy rank 0's parameters and buffers to all ranks at Create, and the parameters that SetParameters adds.
  bool broadcast_parameters = true;

  // Buffers to copy from rank 0 to all ranks in Create (if broadcast_parameters) and in every BeginForward (if
  // broadcast_buffers).
  std::vector<ModelBuffer> buffers = {};
  bool broadcast_buffers = true;  // false: BeginForward does nothing

  // Compares the values of all ranks, frozen ones included, and the buffers that are `replicated`: in the first reduced
  // step and in every check_replicas-th step after it. If they differ, the next FinishBackward returns
  // FailedPrecondition on every rank. The error names the first parameter that differs, the step and the ranks. The
  // group still works. Do not write values between the first GradReady of a step and the end of its FinishBackward (on
  // a GPU: its end in the order of the stream). In a Join, ranks that have finished are not compared. A step that is
  // captured into a CUDA graph is not checked. 0: never. Unset: DDP_CHECK_REPLICAS, or never. The same on all ranks.
  std::optional<int64_t> check_replicas = {};

  // Looks for infinities and NaN in what each rank contributes, before the sum spreads them to all ranks. If there is
  // one, FinishBackward returns DataLoss on every rank. The error names the ranks, for each the gradient that was ready
  // first, and the step. The group still works; the gradients contain the result. With `nonfinite` set (gradient
  // scaling, where such steps occur and are skipped), rank 0 logs the same text as a warning instead. For finding
  // errors: costs a pass over the gradients and a small exchange in each reduced step, and on a GPU the host waits in
  // FinishBackward. Steps that are captured into a CUDA graph, and ranks of weight 0, are not checked. The same on all
  // ranks.
  bool check_nan = false;

  // Measures the replays of steps that are captured into a CUDA graph, too, in groups of two or more ranks. Each replay
  // then takes some microseconds longer for each bucket.
  bool time_replays = false;

  // Replaces the all-reduce of each bucket. Null: an all-reduce.
  std::shared_ptr<CommHook> hook = {};
};

// Times of one bucket in the last step, in nanoseconds since the step's first GradReady.
//
// On a GPU, the times are measured with GPU events and belong to the last measured step: one step in 16, or with an
// observer each step that begins after the previous measurement has been read; of the replays of a CUDA graph, each
// one, but only with DdpOptions::time_replays. ready_ns and launched_ns are then both the time at which the bucket's
// last gradient was written.
struct BucketTimes {
  size_t bytes = 0;         // of its gradients
  size_t gradients = 0;     // how many
  size_t ranges = 0;        // contiguous ranges of memory that they form
  size_t operations = 0;    // operations of the group: one, or several for pieces and hooks
  int64_t ready_ns = 0;     // its last gradient was announced on this rank
  int64_t launched_ns = 0;  // its reduction was passed to the group
  int64_t done_ns = 0;      // its reduction ended, on this rank or, of memory that ranks share, on the last one
};

// What a model reports of its steps.
struct DdpStatistics {
  int64_t steps = 0;                      // reduced steps so far, with the replays of CUDA graphs that have ended
  int64_t plans = 0;                      // how often buckets were planned: once, and once more for every change
  std::vector<BucketTimes> buckets = {};  // those of the last reduced step, in launch order
  // In the last reduced step: the communication that the backward pass did not hide. This is the time in
  // FinishBackward, on a GPU the time that its stream waited.
  int64_t exposed_ns = 0;
  // In the last reduced step: the time in which at least one bucket was launched but not done.
  int64_t communication_ns = 0;
  double overlap = 0;  // over all steps: 1 - sum(exposed) / sum(communication), 0 to 1; 0 without communication
};

// How a Join treats ranks that have no more inputs. The same on all ranks.
struct JoinOptions {
  // The divisor of means. true: the number of ranks that still have inputs. false: the number of all ranks; those that
  // have finished contribute zeros. With DdpOptions::weighted it is always the sum of the weights of the ranks that
  // still have inputs.
  bool divide_by_active = false;
  // If true, every rank gets an error as soon as one rank has no more inputs: OutOfRange from FinishBackward,
  // BeginForward and Join::Finish. If false, the other ranks continue.
  bool throw_on_early = false;
  // The scaler of the training. A rank that has finished does not adapt its scale and counters. Finish copies those of
  // the rank that ran the most steps to all ranks (GradScaler::Broadcast). Set it on all ranks or on none. It must
  // outlive the Join.
  GradScaler* scaler = nullptr;
  // Called on a rank that has no more inputs, after each step of the others. The gradients then hold the result of that
  // step; one that no rank used (kDetect) has not changed, so call ZeroGrad here if the loop does. Use it to keep state
  // equal on all ranks, such as the optimizer's step count. An error ends the training on every rank.
  std::function<absl::Status()> on_shadowed_step = {};
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
// Requirements: all ranks have the same parameters in the same order (Create checks this) and run the same sequence of
// reduced steps. The group must outlive the model (see Rebind). Between GradReady(i) and FinishBackward, gradient i
// belongs to the library: do not access it.
//
// Streams. If the parameters are on a GPU, every call that takes a stream needs one of this GPU, or kNoStream
// (InvalidArgument otherwise; GradReady's and ZeroGrad's errors come from FinishBackward). A call with a stream takes
// effect in the order of that stream. A call with kNoStream comes after the work submitted to the stream that was given
// last, to any call but GradReady, and has taken effect when it returns; Join::Finish and SetParameters are such calls.
// Until then do not destroy the last stream. While the last stream is being captured such a call is refused
// (FailedPrecondition). GradReady with kNoStream: the host has waited for the work that wrote the gradient.
//
// Thread-safety: any number of threads may call GradReady concurrently. Call everything else from one thread at a time.
class DDP_EXPORT DistributedDataParallel {
 public:
  // Collective. Checks that all ranks have the same parameters, options and hook, allocates the memory that the library
  // owns, plans buckets in reverse order of `parameters`, and broadcasts rank 0's values.
  // Errors: FailedPrecondition if ranks differ (names the first difference and the ranks). InvalidArgument for no
  // parameters, a name or memory that is used twice, a shape that contradicts the count, an option out of range.
  static absl::StatusOr<std::unique_ptr<DistributedDataParallel>> Create(ProcessGroup& group,
                                                                         std::vector<Parameter> parameters,
                                                                         const DdpOptions& options = {});

  // In the middle of a step, the destructor aborts the group, so that the peers do not wait in vain.
  virtual ~DistributedDataParallel() = default;

  // `index` is the parameter's position in the list of Create or SetParameters. Addresses never change in the model's
  // life.
  virtual size_t size() const = 0;                             // the number of parameters
  virtual const Parameter& parameter(size_t index) const = 0;  // with its pointers set
  virtual Buffer value(size_t index) const = 0;                // where its value is
  virtual Buffer grad(size_t index) const = 0;                 // where its gradient is, or is to be written

  // Calls fn(index, parameter) for every parameter that is not frozen. For optimizers that take one tensor at a time.
  void ForEachGrad(const std::function<void(size_t index, const Parameter& parameter)>& fn) const {
    for (size_t i = 0; i < size(); ++i) {
      if (!parameter(i).frozen) fn(i, parameter(i));
    }
  }

  // The gradients and the values that the library owns, as one range per dtype: reverse order of parameters, each at a
  // multiple of 256 bytes, with zeros between. Parameters that were added later are in further ranges. The gradients of
  // removed and frozen parameters are zeros. Both have the same layout if all parameters are of floating-point types
  // and the library owns the value and the gradient of each.
  virtual absl::Span<const Buffer> grad_spans() const = 0;
  virtual absl::Span<const Buffer> value_spans() const = 0;  // the values; see grad_spans

  // Call it before the forward pass. Copies rank 0's buffers (DdpOptions::buffers) to all ranks, in one operation. Does
  // nothing if there are no buffers, or within an accumulation (if the last backward pass was not reduced).
  // FailedPrecondition in the middle of a reduced step.
  virtual absl::Status BeginForward(Stream stream = {}) = 0;

  // Announces that gradient `index` has been written for this step. On a GPU: that the work which writes it has been
  // submitted to `stream`. A bucket's reduction starts when its last gradient has been announced and
  // all earlier buckets have been launched. FinishBackward returns errors of this call: an index out of range, a
  // gradient announced twice, a frozen parameter, a gradient without memory.
  virtual void GradReady(size_t index, Stream stream = {}) noexcept = 0;

  // Gives the memory of gradient `index`, before its GradReady, for frameworks that allocate gradients and free them
  // again (PyTorch: grad = None). Count, dtype and device as before (InvalidArgument names the parameter and the rank).
  // FailedPrecondition for a gradient that the library owns, or that it reduces in place in an allocation, and for
  // other memory of one that has been announced in this step. The memory counts for one reduced step: it stays valid
  // until FinishBackward has reduced the gradient, and until the next step if ZeroGrad, GradNorm, ClipGradNorm or
  // ClipGradNormAsync is called. Call SetGrad again in the next step (for memory that never changes use
  // Parameter::grad). A gradient that this rank has not given in a step has no memory here. If other ranks used it
  // (kDetect, static_graph, Join), grad(index) is memory of the library's with the result, until the next step begins;
  // otherwise grad(index).data is null.
  virtual absl::Status SetGrad(size_t index, Buffer grad) = 0;

  // Ends the step: waits for all reductions. On a GPU only the stream waits, and the host continues; a failure after
  // the return is reported by skip_step() and by the next call. With kNoStream the host waits. Errors reach every rank:
  // FailedPrecondition names the parameters that this rank did not announce; the other ranks get Aborted with that
  // cause (in their next step if they had already finished this one).
  virtual absl::Status FinishBackward(Stream stream = {}) = 0;

  // On a GPU: a word in its memory, for StepOptions::skip_step. After FinishBackward, in the order of its stream, it is
  // not 0 if the step's gradients must not be used: a reduction failed, perhaps after FinishBackward had returned, or
  // DdpOptions::nonfinite was set. An optimizer that does not read it needs FinishBackward(kNoStream). The word lives
  // as long as the model. Null on the CPU.
  virtual const uint32_t* skip_step() const = 0;

  // For another group in which the steps exchange something, such as the statistics of a synchronised batch norm: what
  // fails there spoils the gradients. From now on FinishBackward and skip_step() report a failure of `group` as they do
  // one of the model's own group, which fails, too. Between steps, on all ranks that have such a group. It must outlive
  // the model, unless Rebind comes first: then it is not watched any more.
  virtual void Watch(ProcessGroup& group) = 0;

  // Sets all gradients to zero. Not in the middle of a reduced step: FinishBackward returns the error.
  virtual void ZeroGrad(Stream stream = {}) = 0;

  // Sets this rank's weight for all steps that begin later (DdpOptions::weighted), for example its number of samples.
  // Initially 1. It must be finite and not negative, and above 0 on at least one rank; FinishBackward returns the
  // error. A rank with weight 0 contributes zeros, whatever its gradients are.
  virtual void SetWeight(double weight) = 0;

  // Returns the norm of all gradients together, of order 1, 2 or infinity, computed in float64 in one pass. After
  // FinishBackward it has the same bits on every rank. InvalidArgument for any other order, and, as from those below,
  // FailedPrecondition in the middle of a reduced step, whose gradients may or may not be averages yet.
  // On a GPU the host waits for `stream`, and the norm is that of the gradients at this point of the stream.
  virtual absl::StatusOr<double> GradNorm(double order = 2, Stream stream = {}) = 0;

  // Scales all gradients by max_norm / (norm + 1e-6) if this factor is below 1, and returns the norm before scaling. If
  // the norm is not finite, the gradients do not change. On a GPU the host waits.
  virtual absl::StatusOr<double> ClipGradNorm(double max_norm, double order = 2, Stream stream = {}) = 0;

  // The same without a wait on the host: on a GPU, the norm is computed and the gradients are scaled in the order of
  // `stream`, also in a CUDA graph. Returns where the norm before scaling is stored: in memory of the model's device,
  // which lives as long as the model. The next call overwrites it. On a GPU the factor is rounded to float32. With
  // kNoStream the host waits.
  virtual absl::StatusOr<const double*> ClipGradNormAsync(double max_norm, double order = 2, Stream stream = {}) = 0;

  // OK if steps of this model can be captured into a CUDA graph (docs/guide/gpu.md). Otherwise FailedPrecondition with
  // what stands against it, the same on all ranks: FinishBackward and BeginForward return it if they are captured. Any
  // thread.
  virtual absl::Status CanCapture() const = 0;

  // Copies the values of rank `root`, frozen ones included, and its buffers to all ranks. Collective, between steps.
  // Call it when values have been written after Create; values that the library owns can only be written then.
  // FailedPrecondition in the middle of a step or inside a Join.
  virtual absl::Status BroadcastValues(int root = 0, Stream stream = {}) = 0;

  // Collective, between steps. Replaces the list of parameters, for example to freeze or add some. Names identify
  // parameters. Parameters that the model already has keep their memory and addresses; pointers passed for them are
  // ignored. New ones get memory and, if broadcast_parameters, rank 0's values. Those that are not in the list are
  // removed. Indices refer to the new list. Within an accumulation, gradients do not change, and announced gradients
  // stay announced, except those of frozen parameters. Errors as in Create; the model then does not change.
  virtual absl::Status SetParameters(std::vector<Parameter> parameters) = 0;

  // Turns reduction off: a backward pass that begins while a NoSync lives is not reduced. Its gradients stay local, and
  // FinishBackward only ends the step (on a GPU, its stream goes on behind those of GradReady; it must live until the
  // next FinishBackward). A backward pass begins with its first GradReady. The first one that begins after the last
  // NoSync is destroyed is reduced.
  class [[nodiscard]] NoSync {
   public:
    // From now on. Several may live at the same time.
    explicit NoSync(DistributedDataParallel& model) : model_(model) { model_.ChangeNoSync(+1); }
    ~NoSync() { model_.ChangeNoSync(-1); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DistributedDataParallel& model_;
  };

  // For ranks with different numbers of steps. Every rank creates a Join, runs its steps, and calls Finish when it has
  // no more inputs. In Finish, a rank takes part in the other ranks' reductions until all have finished. Then all ranks
  // get the parameters, the buffers and (with JoinOptions::scaler) the loss scale of the rank that ran the most steps.
  // Costs a small exchange at the start of every step.
  //
  //   ddp::DistributedDataParallel::Join join(*model);
  //   while (NextBatch()) { ...one step... }
  //   absl::Status s = join.Finish();
  //
  // After an error that all ranks have had (OutOfRange, a NaN that check_nan found, weights of 0), the Join is over:
  // destroy it before the next step. A step in it is refused (FailedPrecondition).
  // A Join that is destroyed before Finish, or such an error, aborts the group, so that no peer waits for this rank.
  // One that is over may be destroyed at any time, also when the next one has begun.
  class [[nodiscard]] Join {
   public:
    // Collective, between steps. Begins the loop. In the middle of a reduced step, and inside of another Join that is
    // not over, it begins nothing: the next FinishBackward, and Finish, return FailedPrecondition.
    explicit Join(DistributedDataParallel& model, JoinOptions options = {})
        : model_(model), ticket_(model.BeginJoin(std::move(options))) {}
    ~Join() { model_.LeaveJoin(ticket_); }
    Join(const Join&) = delete;
    Join& operator=(const Join&) = delete;

    // Serves the other ranks until all have finished, and then makes the models equal. After a failure of the group,
    // call it again when Rebind has found another. DataLoss, on every rank: the rank with the last model is gone, and
    // all others have a part of it.
    absl::Status Finish() { return model_.FinishJoin(ticket_); }

   private:
    DistributedDataParallel& model_;
    const uint64_t ticket_;
  };

  // Times of the last step, and what fraction of the communication was hidden by the backward pass.
  virtual DdpStatistics statistics() = 0;

  // Moves the model to another group: after a failure, to that of the remaining ranks (Context::NewGroup). Collective
  // over `group`, which must outlive the model; the earlier group may be destroyed. Checks that all ranks of `group`
  // have the same model, and registers the gradients' memory with it.
  //   - Addresses, values and gradients do not change. Make the values equal with SyncState.
  //   - Bucket plans start as in Create, hooks are reset (CommHook::Reset), and all ranks take over rank 0's step
  //     count, because the last step may have ended on some ranks only.
  //   - A step that was in progress is dropped: its gradients are invalid.
  // FailedPrecondition in the middle of a step if the present group still works. After any other error, call it again
  // with a working group.
  virtual absl::Status Rebind(ProcessGroup& group) = 0;

 private:
  virtual void ChangeNoSync(int delta) = 0;
  // A Join that was refused has the ticket 0. Those of one that is over are stale.
  virtual uint64_t BeginJoin(JoinOptions options) = 0;
  virtual absl::Status FinishJoin(uint64_t ticket) = 0;
  virtual void LeaveJoin(uint64_t ticket) = 0;
};

}  // namespace ddp

#endif  // DDP_DISTRIBUTED_DATA_PARALLEL_H_
