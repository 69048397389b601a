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
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// One trainable tensor. `name` is unique in the model. `shape` is compared between ranks if given; its product is
// value.count.
//   value.data null: the library owns the memory (see DistributedDataParallel::value).
//   grad.data null:  the library owns the gradient, in memory that the group reduces in place (fastest; the usual
//   case). Its count, dtype and
//                    device are value's.
//   grad.data set:   the gradient lives in the caller's memory, is reduced there, and has value's count; its dtype may
//   differ.
struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  Buffer value;
  Buffer grad;
};

struct DdpOptions {
  // Gradients are reduced in buckets of about this size, the first one smaller so that reduction begins early. A
  // gradient is never split. A cap set by the user applies to the first bucket too unless that is set as well: 0 means
  // 1 MiB, or bucket_bytes where it is not the default.
  size_t bucket_bytes = size_t{25} << 20;
  size_t first_bucket_bytes = 0;
  // kAvg (the default) or kSum.
  ReduceOp op = ReduceOp::kAvg;
  // If set, 1 is stored there in a step, before FinishBackward returns, where a reduced gradient has an infinity or a
  // NaN; otherwise it is left alone. Equal on all ranks. The check rides on the reduction. Set on all ranks or on none.
  uint32_t* nonfinite = nullptr;
  // Copy rank 0's parameters to all ranks at Create.
  bool broadcast_parameters = true;
};

// Times of one bucket in the last step, in nanoseconds since the step's first GradReady. `done` is when this rank saw
// the reduction finished.
struct BucketTimes {
  size_t bytes = 0;
  int64_t ready_ns = 0;     // its last gradient was announced here
  int64_t launched_ns = 0;  // its reduction was handed to the group
  int64_t done_ns = 0;
};

struct DdpStatistics {
  int64_t steps = 0;                 // reduced steps so far
  std::vector<BucketTimes> buckets;  // of the last reduced step, in launch order
  int64_t exposed_ns =
      0;  // of the last reduced step: communication that backward did not hide = time in FinishBackward
  int64_t communication_ns =
      0;               // of the last reduced step: time in which at least one bucket was launched and not done
  double overlap = 0;  // of all steps: 1 - sum(exposed) / sum(communication), 0 to 1; 0 if nothing was communicated
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
  // Collective. Verifies that all ranks have the same parameters (FailedPrecondition names the first difference and the
  // ranks), allocates what the library owns, plans buckets in reverse order of `parameters`, and broadcasts rank 0's
  // values. InvalidArgument: no parameters, a name used twice, a shape that contradicts the count, null pointers with
  // no memory to own.
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

  // The gradients that the library owns, as one range per dtype in memory order (reverse parameter order, each gradient
  // at a multiple of 256 bytes, zeros between), and the values it owns with the same layout.
  virtual absl::Span<const Buffer> grad_spans() const = 0;
  virtual absl::Span<const Buffer> value_spans() const = 0;

  // Announces that gradient `index` has been written for this step. When the last gradient of a bucket is announced,
  // and all earlier buckets have been launched, its reduction starts. Misuse (an index out of range, a gradient
  // announced twice) is remembered and returned by FinishBackward.
  virtual void GradReady(size_t index, Stream stream = {}) noexcept = 0;

  // Ends the step: waits for all reductions. Returns what went wrong in it, on every rank: FailedPrecondition naming
  // the parameters that this rank did not announce; Aborted with that cause on the others (in their next step, where
  // they were through with this one).
  virtual absl::Status FinishBackward(Stream stream = {}) = 0;

  // Sets all gradients to zero.
  virtual void ZeroGrad(Stream stream = {}) = 0;

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

  virtual DdpStatistics statistics() const = 0;

  // Goes on in another group: after a failure, in that of the survivors (Context::NewGroup). Collective over `group`,
  // which outlives the model from now on; the earlier one may go. Checks that all its ranks have the same model, and
  // registers the gradients' memory there. Addresses and plan stay; values and gradients are left as they are, so make
  // them equal: SyncState. A step that was under way is dropped: its gradients are worthless. FailedPrecondition in the
  // middle of a step of a group that works. After another error call it again, with a group that works.
  virtual absl::Status Rebind(ProcessGroup& group) = 0;

 private:
  virtual void ChangeNoSync(int delta) = 0;
};

}  // namespace ddp

#endif  // DDP_DISTRIBUTED_DATA_PARALLEL_H_
