// SPDX-License-Identifier: Apache-2.0
// Communication hooks: code that replaces the plain all-reduce of a bucket, for example to compress gradients.
#ifndef DDP_COMM_HOOK_H_
#define DDP_COMM_HOOK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// One bucket in one step, as a hook sees it. The library owns the memory.
struct GradBucket {
  // One gradient of the bucket.
  struct Gradient {
    size_t parameter = 0;             // its index in the model
    std::string name = {};            // unique in the model; use it as the key of a hook's state
    std::vector<int64_t> shape = {};  // empty if the program gave none
    size_t offset = 0;                // its start in `buffer`, in elements
    size_t count = 0;                 // elements
  };

  size_t index = 0;      // buckets are reduced in the order of their index
  bool is_last = false;  // the last bucket of the step
  int64_t step = 0;      // the number of reduced steps that the model has completed
  // All gradients of the bucket as one array, with zeros between them. It holds the input, and after Finish the result.
  // It is the gradients' own memory, or a packed copy if they are not adjacent.
  Buffer buffer = {};
  std::vector<Gradient> gradients = {};  // in the order of `buffer`
  // The operator and scales with which an all-reduce of `buffer` gives the result of the step (mean, sum, weighted
  // mean).
  ReduceOptions reduce = {};
  // This rank's part of the result, for error feedback: if the gradients of all ranks are equal, `buffer` holds `share`
  // times the result. An all-reduce of all ranks' shares with `reduce` gives 1. Its value is 1 for a mean over all n
  // ranks, and 1/n for a sum. In a Join, for a mean over n ranks of which m still have inputs, it is n/m on these m
  // ranks and 0 on the others.
  double share = 1;
  // Pass it to operations on `buffer`: on a GPU, the gradients are written in the order of this stream.
  Stream stream = {};
};

// Communicates the buckets. Each bucket takes rounds() operations one after the other: the library calls Start with
// round 0, with round 1 when that operation is done, and so on, and finally Finish. All operations of a bucket are
// called before the first one of the next bucket, so that all ranks make the same sequence of calls whatever their
// timing.
//
//   class SignOnly : public ddp::CommHook {
//    public:
//     std::string name() const override { return "sign_only"; }
//     ddp::Work Start(ddp::ProcessGroup& group, const ddp::GradBucket& bucket, int) override {
//       float* g = static_cast<float*>(bucket.buffer.data);
//       for (size_t i = 0; i < bucket.buffer.count; ++i) g[i] = std::copysign(1.0f, g[i]);
//       return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream);
//     }
//   };
//
// A hook belongs to one model. GradReady and FinishBackward call its methods, from one thread at a time. The methods
// must not call the model. An error or an exception ends the step on every rank, with this cause. A hook that uses a
// group of its own also aborts that group: otherwise the other ranks wait in it, until its time-out.
class DDP_EXPORT CommHook {
 public:
  virtual ~CommHook() = default;

  // The hook and its settings, such as "power_sgd(rank=2, ...)". Create compares it between ranks.
  virtual std::string name() const = 0;

  // The number of operations per bucket. It is the same on all ranks and never changes.
  virtual int rounds() const { return 1; }

  // Collective. Called with all buckets in Create and whenever they change, to allocate the memory that they need. Keep
  // the state of a parameter under the parameter's name: then it survives such a change. Discard the state of
  // parameters that are in no bucket. An error or an exception on one rank is returned on every rank. If Prepare
  // makes collective calls itself, let the ranks agree first that none has failed.
  virtual absl::Status Prepare(ProcessGroup& group, absl::Span<const GradBucket> buckets);

  // OK if steps with this hook can be captured into a CUDA graph: Start and Finish do nothing but submit work to
  // streams, the same in every step. Otherwise FailedPrecondition with the reason.
  virtual absl::Status CanCapture() const { return absl::OkStatus(); }

  // Called when the model continues in another group (DistributedDataParallel::Rebind). The last step may have ended in
  // the middle, or only on some ranks. Discard all state of earlier steps, because it may differ between ranks. Prepare
  // follows. A hook that contains another hook calls its Reset too.
  virtual void Reset() {}

  // Starts one operation and returns without waiting for it. Returns Work() if this round has nothing to do.
  virtual Work Start(ProcessGroup& group, const GradBucket& bucket, int round) = 0;

  // Called for each bucket in turn, when its last round is done. Writes the result to bucket.buffer, equal on all
  // ranks. If a result is not finite, programs skip the step; the hook's state should then stay as it was before the
  // step.
  virtual absl::Status Finish(const GradBucket& bucket);
};

// An operation of the program's own on a GPU, for example kernels that a hook runs on its own stream: done when all
// work submitted to `stream` so far is. `group` must outlive it: if the group fails, so does the operation, because
// what the stream waits for may never come. Wait without a deadline of its own is DeadlineExceeded after the group's
// time-out.
//
//   ddp::Work sum = group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream);
//   if (absl::Status s = sum.BlockStream(mine); !s.ok()) return s;
//   Decompress<<<..., static_cast<cudaStream_t>(mine.native)>>>(...);
//   return ddp::StreamWork(group, mine);
//
// InvalidArgument if `stream` is not a GPU's.
DDP_EXPORT Work StreamWork(ProcessGroup& group, Stream stream);

// A hook that does the same as no hook: one all-reduce per bucket.
DDP_EXPORT std::shared_ptr<CommHook> CreateAllReduceHook();

// Sends gradients as `wire`, which is kFloat16 or kBFloat16, rounded to nearest even. Buckets that already have this
// type, and float64 buckets, are sent unchanged. The sum is computed in float32 and not rounded again. With float16,
// set a gradient_predivide_factor if gradients come near 65504. `inner`, if given, receives buckets of the wire type
// and communicates them.
DDP_EXPORT std::shared_ptr<CommHook> CreateCompressionHook(DType wire, std::shared_ptr<CommHook> inner = nullptr);

// The 8-bit type of CreateBlockCompressionHook.
enum class BlockFormat : uint8_t {
  kInt8,        // steps of the same size
  kFloat8E4M3,  // fp8 with 4 bits of exponent and 3 of mantissa: finer near zero, coarser far from it
};

// Sends gradients in 8 bits: each block of 128 elements has a float32 scale, so a float32 gradient takes 1.03 bytes in
// place of 4. Each rank reduces a part of the bucket: it receives the part of every rank in 8 bits, adds them in
// float32 in rank order, rounds the result to 8 bits once more, and sends it to all. All ranks get the same bits. On
// GPUs the hierarchical backend does all of this in one kernel.
//
// An element is rounded, twice, by at most 1/254 of the largest magnitude in its block (kInt8), or by 1/16 of itself
// and 1/458,752 of the largest (kFloat8E4M3). A block with an infinity or a NaN becomes NaN, so that `nonfinite` and
// the gradient scaler see it. One whose magnitudes are all below 2^-100 becomes zero. Blocks are counted from the start
// of the bucket, so results depend on the bucket plan. Float64 buckets, and all buckets of a single rank, are reduced
// unchanged. There is no state. Its memory is about half of a float32 bucket's, and none where it is one kernel.
DDP_EXPORT std::shared_ptr<CommHook> CreateBlockCompressionHook(BlockFormat format = BlockFormat::kInt8);

// The settings of CreatePowerSgdHook. The same on all ranks.
struct PowerSgdOptions {
  int rank = 1;                // rank of the approximation; 1 or more
  int64_t start_step = 10;     // the number of uncompressed steps at the start; 0 or more
  double min_ratio = 2;        // parameters that would not shrink by this factor are not compressed
  bool warm_start = true;      // start each step's power iteration from the previous result
  bool error_feedback = true;  // add the compression error of the previous step to each gradient
  uint64_t seed = 1;           // random seed of the first Q
};

// Low-rank compression: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
// Distributed Optimization", NeurIPS 2019, algorithm 1 with error feedback (algorithm 2).
//
// If the shape of a parameter has two or more dimensions, its gradient is a matrix M with shape[0] rows. Instead of M,
// ranks exchange P = MQ and Q = M'P, which have (rows + columns) x rank elements. Other gradients are reduced
// uncompressed, in the same operation as P.
//
// It computes where the gradients are; on GPUs the host waits for nothing. From start_step on, steps can be captured
// into a CUDA graph.
//
// The state takes twice the size of the gradients in float32 (once without error feedback). A step whose result
// contains an infinity or a NaN does not change the state. Frozen and removed parameters lose their state. With
// UnusedParameters::kDetect, a step that uses a parameter on no rank loses a part of what error feedback has kept of
// it. The model's Create returns InvalidArgument for a rank below 1 or a start_step below 0.
DDP_EXPORT std::shared_ptr<CommHook> CreatePowerSgdHook(const PowerSgdOptions& options = {});

}  // namespace ddp

#endif  // DDP_COMM_HOOK_H_
