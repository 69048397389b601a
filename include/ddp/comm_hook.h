// What is done with a bucket of gradients instead of a plain all-reduce: compression, or anything of the user's.
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

// One bucket in one step, as a hook sees it. The memory is the library's and borrowed.
struct GradBucket {
  struct Gradient {
    size_t parameter = 0;        // its index in the model
    std::string name;            // unique in the model: what a hook keys its state by
    std::vector<int64_t> shape;  // empty where the program gave none
    size_t offset = 0;           // where it begins in `buffer`, in elements
    size_t count = 0;
  };

  size_t index = 0;      // buckets are reduced in the order of their index
  bool is_last = false;  // of the step
  int64_t step = 0;      // reduced steps that the model has behind it
  // All gradients of the bucket as one array, zeros between them: input, and after Finish the result. It is the memory
  // in which the gradients live, or a packed copy where they do not lie together.
  Buffer buffer;
  std::vector<Gradient> gradients;
  // Operator and scales by which an all-reduce of the buffer gives what the step is to give (mean, sum, weighted mean).
  ReduceOptions reduce;
  // This rank's part of the result, for error feedback: where all ranks' gradients are alike, the buffer holds `share`
  // times the result. An all-reduce of all ranks' shares by `reduce` gives 1. So 1 for a mean over all n ranks and 1/n
  // for a sum; in a Join n/m for a mean over n ranks of which m have inputs, and 0 on those that have none.
  double share = 1;
  Stream stream;
};

// How buckets are communicated. A bucket takes rounds() operations one after the other: Start(0); when that is done
// Start(1); ... and at last Finish. All operations of a bucket are called before the first of the next bucket, so that
// all ranks make the same sequence of calls whatever their timing.
//
//   class SignOnly : public ddp::CommHook {
//    public:
//     std::string name() const override { return "sign_only"; }
//     absl::StatusOr<ddp::Work> Start(ddp::ProcessGroup& group, const ddp::GradBucket& bucket, int) override {
//       float* g = static_cast<float*>(bucket.buffer.data);
//       for (size_t i = 0; i < bucket.buffer.count; ++i) g[i] = std::copysign(1.0f, g[i]);
//       return group.AllReduce({&bucket.buffer, 1}, {&bucket.buffer, 1}, bucket.reduce);
//     }
//   };
//
// A hook belongs to one model. Its methods are called from one thread at a time, from within GradReady and
// FinishBackward; they must not call the model. An error, or an exception, ends the step with that cause on every rank.
class DDP_EXPORT CommHook {
 public:
  virtual ~CommHook() = default;

  // The hook and its settings, "power_sgd(rank=2, ...)": compared between ranks at Create.
  virtual std::string name() const = 0;

  // Operations for each bucket; the same on all ranks, and for the life of the hook.
  virtual int rounds() const { return 1; }

  // Collective. Called at Create and whenever the buckets change, with all of them; for memory that they need. State of
  // a parameter outlives such a change if it is kept by the parameter's name.
  virtual absl::Status Prepare(ProcessGroup& group, absl::Span<const GradBucket> buckets);

  // The model goes on in another group (DistributedDataParallel::Rebind), perhaps after a step that ended in the middle
  // or on some ranks only: forget what steps have left, as it need not be the same on all ranks. Prepare follows. A
  // hook that calls another one passes it on.
  virtual void Reset() {}

  // Begins one operation and returns without waiting for it. Work() where there is nothing to do in this round.
  virtual absl::StatusOr<Work> Start(ProcessGroup& group, const GradBucket& bucket, int round) = 0;

  // After the last round is done: leaves the result in bucket.buffer, equal on all ranks.
  virtual absl::Status Finish(const GradBucket& bucket);
};

// What happens without a hook.
DDP_EXPORT std::shared_ptr<CommHook> CreateAllReduceHook();

// Gradients travel as `wire`, kFloat16 or kBFloat16, rounded to nearest even; buckets of that type already, and of
// float64, are left as they are. The sum is formed in float32 and not rounded again. For float16 choose a
// gradient_predivide_factor where gradients come near 65504. `inner`, if given, sees buckets of the wire type and does
// the communication.
DDP_EXPORT std::shared_ptr<CommHook> CreateCompressionHook(DType wire, std::shared_ptr<CommHook> inner = nullptr);

struct PowerSgdOptions {
  int rank = 1;                // of the approximation, 1 or more
  int64_t start_step = 10;     // steps reduced in full before compression begins
  double min_ratio = 2;        // parameters that would not shrink by this factor are reduced in full
  bool warm_start = true;      // begin each step's power iteration with the last one's result
  bool error_feedback = true;  // add to each gradient what compression lost of the one before
  uint64_t seed = 1;           // of the first Q
};

// Low-rank compression: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
// Distributed Optimization", NeurIPS 2019, algorithm 1 with error feedback (algorithm 2). A gradient whose parameter
// has a shape of two or more dimensions is taken as a matrix M of shape[0] rows; ranks exchange P = MQ and Q = M'P
// instead of M, (rows + columns) x rank numbers. Others are reduced in full in the same operation as P. State (error
// and Q) takes the size of the gradients once more, in float32. InvalidArgument at Create of the model for a rank below
// 1, or a start_step below 0.
DDP_EXPORT std::shared_ptr<CommHook> CreatePowerSgdHook(const PowerSgdOptions& options = {});

}  // namespace ddp

#endif  // DDP_COMM_HOOK_H_
