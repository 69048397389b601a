// SPDX-License-Identifier: Apache-2.0
// The buckets of a model, and their reduction in the step that runs.
#ifndef LIBDDP_REDUCER_REDUCER_H_
#define LIBDDP_REDUCER_REDUCER_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "libddp/reducer/bucket_plan.h"
#include "libddp/reducer/gpu_timer.h"
#include "libddp/reducer/grad_streams.h"
#include "libddp/reducer/memory.h"
#include "libddp/reducer/scratch.h"

namespace ddp {

// How this step's buckets are reduced.
struct StepScale {
  ReduceOptions reduce;
  double local = 1;  // this rank's contribution is multiplied by it first
  double share = 1;  // see GradBucket::share
};

// On a GPU no step waits on the host: what follows a reduction is ordered behind it on a stream.
//
// Thread-safety: CountDown and launched() from any thread; the rest by one thread at a time.
class Reducer {
 public:
  struct Caps {
    BucketCaps bucket;
    size_t piece = 0;  // bytes of an operation; 0: a whole bucket
  };

  // What comes before a bucket's reduction; on a GPU it is submitted to the stream.
  using OnBucket = std::function<absl::Status(const Bucket& bucket, Stream stream)>;

  // `streams` outlives it. copy_in, on a GPU: brings gradients from memory of the program's to their slots. inspect:
  // looks at what this rank contributes; may be null.
  Reducer(ProcessGroup* group, std::shared_ptr<CommHook> hook, uint32_t* nonfinite, GradStreams* streams,
          OnBucket copy_in, OnBucket inspect)
      : group_(group),
        hook_(std::move(hook)),
        nonfinite_(nonfinite),
        streams_(*streams),
        copy_in_(std::move(copy_in)),
        inspect_(std::move(inspect)) {}

  // Collective, between steps. Groups the gradients listed in `order`, the order in which they are expected.
  absl::Status Plan(const std::vector<Trained>& all, absl::Span<const size_t> order, const ModelMemory& memory,
                    const Caps& caps);
  // Between steps: goes on in another group, and needs a plan there first. The error is the hook's.
  absl::Status Rebind(ProcessGroup* group);
  absl::Status CanCapture() const;  // says what the hook has against it
  const std::vector<Bucket>& plan() const { return plan_; }

  // --- One step: Begin; CountDown and Ready for every gradient; SetScale; Advance now and then; IssueAll and WaitAll;
  // --- End. After an error: Abandon, End.
  void Begin(int64_t begin_ns);
  // A gradient is there. True for the last one of its bucket, which Ready is to be called for.
  bool CountDown(size_t parameter) {
    return buckets_[bucket_of_[parameter]]->pending.fetch_sub(1, std::memory_order_acq_rel) == 1;
  }
  void Ready(size_t parameter);
  // Nothing is launched before.
  void SetScale(const StepScale& scale, int64_t step);
  bool scaled() const { return scaled_; }
  // Does what can be done without waiting; what goes wrong comes out of IssueAll.
  void Advance(Stream stream);
  // Launches what is left, which has to be ready, until no bucket has an operation left to begin.
  absl::Status IssueAll(Stream stream);
  // Waits until the reductions are complete; on a GPU makes the stream wait.
  absl::Status WaitAll(Stream stream);
  // Blocks the host until what was launched in this step is done. Its outcome.
  absl::Status Abandon();
  // The same for what an earlier step has left under way on a GPU.
  absl::Status Drain();
  void End();
  // The GPU may use its memory and streams for ever: they are kept.
  void Forsake();
  bool Pending() const;  // whether an operation is under way

  size_t launched() const { return launched_.load(std::memory_order_relaxed); }  // buckets
  size_t done() const { return done_; }                                          // buckets, in order
  const Bucket& bucket(size_t b) const { return plan_[b]; }
  std::vector<BucketTimes> times() const;
  const std::shared_ptr<const BucketNames>& names() const { return names_; }
  GpuTimer& timer() { return timer_; }
  // What measures this step instead, which is captured; null: nothing does.
  void UseTimer(GpuTimer* timer) { step_timer_ = timer; }

 private:
  // What one bucket is made of, and how far it is in the step that runs.
  struct BucketState {
    std::vector<Buffer> ranges;
    std::vector<std::vector<Buffer>> pieces;  // without a hook: one operation each
    GradBucket view;                          // with a hook
    bool packed = false;                      // view.buffer is a copy of the ranges
    std::vector<Buffer> gaps;                 // of view.buffer, between gradients
    bool copied = false;                      // gradients come from and go to memory of the program's
    std::atomic<int> pending{0};              // gradients not announced yet
    bool ready = false;
    int round = 0;            // operations begun
    std::vector<Work> works;  // of the last round begun
    BucketTimes times;

    bool Done() const {
      return std::all_of(works.begin(), works.end(), [](const Work& work) { return work.Done(); });
    }
  };

  absl::Status PrepareHook(const std::vector<Trained>& all);
  bool InRounds() const;  // the last launched bucket has operations left to begin
  void Launch(Stream stream);
  bool TimedAtLaunch() const;  // the timer is told of a bucket when it has been launched, not at the step's end
  absl::Status TellTimer(size_t b);
  void StartRound(BucketState& bucket);
  absl::Status Collect(BucketState& bucket, Stream stream);
  void Complete(BucketState& bucket, Stream stream);
  std::string Where(const BucketState& bucket) const;
  absl::Status OfHook(const BucketState& bucket, const absl::Status& error) const;
  template <typename Fn>
  auto Call(const BucketState& bucket, Fn&& fn) -> decltype(fn());

  ProcessGroup* group_;
  const std::shared_ptr<CommHook> hook_;
  std::string hook_name_ = "the hook";  // as it said when the plan was made; it may throw
  int rounds_ = 1;                      // as well
  uint32_t* const nonfinite_;
  GradStreams& streams_;
  const OnBucket copy_in_, inspect_;
  GpuTimer timer_;
  GpuTimer* step_timer_ = &timer_;  // of this step
  std::vector<Work> in_flight_;     // on a GPU, of the step before: when they are done, all are

  std::vector<Bucket> plan_;
  std::vector<std::unique_ptr<BucketState>> buckets_;
  std::vector<size_t> bucket_of_;  // by parameter
  std::shared_ptr<const BucketNames> names_;
  Scratch packed_;          // for hooks: copies of buckets whose gradients do not lie together
  bool capturing_ = false;  // this step

  int64_t begin_ns_ = 0, step_ = 0;
  StepScale scale_;
  bool scaled_ = false;
  std::atomic<size_t> launched_{0};
  size_t done_ = 0;
  absl::Status status_;  // the first failure of this step
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_REDUCER_H_
