#include "ddp/distributed_data_parallel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/base/spin.h"
#include "libddp/device/host_memory.h"
#include "libddp/reducer/bucket_plan.h"
#include "libddp/reducer/layout.h"
#include "libddp/reducer/verify.h"

namespace ddp {
namespace {

constexpr size_t kDefaultBucketBytes = DdpOptions().bucket_bytes;
constexpr size_t kDefaultFirstBucketBytes = size_t{1} << 20;

// What one bucket is made of, and how far it is in the step that runs.
struct BucketState {
  std::vector<Buffer> ranges;
  int parameters = 0;
  std::atomic<int> pending{0};  // gradients not announced yet
  // The following are guarded by the model's mutex.
  bool ready = false;
  Work work;
  BucketTimes times;
};

class Model final : public DistributedDataParallel {
 public:
  Model(ProcessGroup& group, std::vector<Parameter> parameters, const DdpOptions& options)
      : group_(&group), parameters_(std::move(parameters)), options_(options) {}
  ~Model() override;

  absl::Status Build();

  size_t size() const override { return parameters_.size(); }
  const Parameter& parameter(size_t index) const override { return parameters_[index]; }
  Buffer value(size_t index) const override { return parameters_[index].value; }
  Buffer grad(size_t index) const override { return parameters_[index].grad; }
  absl::Span<const Buffer> grad_spans() const override { return grad_spans_; }
  absl::Span<const Buffer> value_spans() const override { return value_spans_; }

  void GradReady(size_t index, Stream stream) noexcept override;
  absl::Status FinishBackward(Stream stream) override;
  void ZeroGrad(Stream stream) override;
  DdpStatistics statistics() const override;
  absl::Status Rebind(ProcessGroup& group) override;

 private:
  absl::Status Own(const std::vector<size_t>& order);
  void Plan(const std::vector<size_t>& order);
  absl::Status BroadcastValues();
  std::vector<Parameter> AsGiven() const;
  void ChangeNoSync(int delta) override { no_sync_ += delta; }

  // With the mutex held:
  void BeginStep();
  void LaunchReady();
  void NoteDone();
  void Misused(absl::string_view what);
  absl::Status Missing() const;
  absl::Status WaitForAll();
  void EndStep();
  void RecordStatistics(int64_t exposed_ns);

  ProcessGroup* group_;
  std::vector<Parameter> parameters_;
  const DdpOptions options_;

  std::vector<Allocation> grad_memory_;
  std::vector<std::shared_ptr<void>> value_memory_;
  std::vector<Buffer> grad_spans_, value_spans_;
  std::vector<std::unique_ptr<BucketState>> buckets_;
  std::vector<size_t> bucket_of_;  // by parameter

  // The step. GradReady touches the atomics from any thread.
  std::unique_ptr<std::atomic<uint8_t>[]> announced_;  // by parameter
  std::atomic<bool> in_step_{false};
  std::atomic<bool> reducing_{false};  // of this step: whether it is reduced at all
  std::atomic<size_t> launched_{0};    // buckets of this step handed to the group
  std::atomic<int> no_sync_{0};
  mutable std::mutex mutex_;
  int64_t begin_ns_ = 0;
  size_t done_ = 0;      // buckets of this step seen finished, in order
  absl::Status misuse_;  // the first of this step
  DdpStatistics statistics_;
  int64_t exposed_sum_ns_ = 0, communication_sum_ns_ = 0;
};

// --- creation -------------------------------------------------------------------------------------------------------

absl::Status Model::Build() {
  // Gradients are expected in reverse order of registration: the last layer's first.
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  if (absl::Status s = Own(order); !s.ok()) return s;
  Plan(order);
  announced_ = std::make_unique<std::atomic<uint8_t>[]>(parameters_.size());
  EndStep();
  return options_.broadcast_parameters ? BroadcastValues() : absl::OkStatus();
}

// Gives the library's parameters and gradients their place.
absl::Status Model::Own(const std::vector<size_t>& order) {
  std::vector<Buffer> values, grads;
  std::vector<bool> own_value, own_grad;
  for (Parameter& p : parameters_) {
    own_value.push_back(p.value.data == nullptr);
    own_grad.push_back(p.grad.data == nullptr);
    if (own_grad.back()) p.grad = Buffer{nullptr, p.value.count, p.value.dtype, p.value.device};
    values.push_back(p.value);
    grads.push_back(p.grad);
  }
  const Layout value_layout = LayOut(values, own_value, order), grad_layout = LayOut(grads, own_grad, order);
  for (const Arena& arena : value_layout.arenas) {
    absl::StatusOr<std::shared_ptr<void>> memory = AllocateHost(std::max<size_t>(arena.bytes, kItemAlign));
    if (!memory.ok()) return memory.status();
    value_memory_.push_back(*std::move(memory));
    value_spans_.push_back({value_memory_.back().get(), arena.bytes / SizeOf(arena.dtype), arena.dtype, Device{}});
  }
  for (const Arena& arena : grad_layout.arenas) {
    absl::StatusOr<Allocation> memory = group_->Allocate(std::max<size_t>(arena.bytes, kItemAlign), Device{});
    if (!memory.ok()) return memory.status();
    grad_memory_.push_back(*std::move(memory));
    grad_spans_.push_back(grad_memory_.back().View(arena.dtype, 0, arena.bytes / SizeOf(arena.dtype)));
  }
  const auto at = [](const std::vector<Buffer>& spans, const Place& place, void* otherwise) -> void* {
    if (place.arena < 0) return otherwise;
    return static_cast<char*>(spans[static_cast<size_t>(place.arena)].data) + place.offset;
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    p.value.data = at(value_spans_, value_layout.places[i], p.value.data);
    p.grad.data = at(grad_spans_, grad_layout.places[i], p.grad.data);
  }
  return absl::OkStatus();
}

void Model::Plan(const std::vector<size_t>& order) {
  std::vector<BucketItem> items;
  for (const Parameter& p : parameters_) items.push_back({p.grad.dtype, p.grad.count * SizeOf(p.grad.dtype)});
  size_t first = options_.first_bucket_bytes;
  if (first == 0) {
    first = options_.bucket_bytes == kDefaultBucketBytes ? kDefaultFirstBucketBytes : options_.bucket_bytes;
  }
  bucket_of_.resize(parameters_.size());
  for (const Bucket& planned : PlanBuckets(items, order, first, options_.bucket_bytes)) {
    auto bucket = std::make_unique<BucketState>();
    std::vector<Buffer> gradients;
    for (size_t i : planned.items) {
      gradients.push_back(parameters_[i].grad);
      bucket_of_[i] = buckets_.size();
    }
    bucket->ranges = MergeAdjacent(gradients, grad_spans_);
    if (bucket->ranges.empty()) bucket->ranges.push_back(gradients[0]);  // nothing but empty gradients
    bucket->parameters = static_cast<int>(planned.items.size());
    bucket->times.bytes = planned.bytes;
    Log().debug("rank {}: bucket {}: {} gradients, {} bytes, {} ranges", group_->rank(), buckets_.size(),
                bucket->parameters, planned.bytes, bucket->ranges.size());
    buckets_.push_back(std::move(bucket));
  }
}

absl::Status Model::BroadcastValues() {
  for (DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<Buffer> values;
    for (const Parameter& p : parameters_) {
      if (p.value.dtype == dtype) values.push_back(p.value);
    }
    if (values.empty()) continue;
    absl::StatusOr<Work> work = group_->Broadcast(values, 0);
    absl::Status status = work.ok() ? work->Wait() : work.status();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

Model::~Model() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t b = 0; b < launched_; ++b) {
    Work& work = buckets_[b]->work;
    if (work.Done()) continue;
    group_->Abort(absl::AbortedError("a DistributedDataParallel was destroyed in the middle of a step"));
    work.Wait().IgnoreError();
  }
}

// --- the step -------------------------------------------------------------------------------------------------------

void Model::BeginStep() {
  if (in_step_) return;
  begin_ns_ = NowNs();
  reducing_ = no_sync_ == 0;
  in_step_ = true;
}

void Model::GradReady(size_t index, Stream) noexcept {
  if (!in_step_.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(mutex_);
    BeginStep();
  }
  if (index >= parameters_.size()) {
    std::lock_guard<std::mutex> lock(mutex_);
    return Misused(absl::StrCat("GradReady(", index, "): there are ", parameters_.size(), " parameters"));
  }
  if (announced_[index].exchange(1, std::memory_order_relaxed) != 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    return Misused(absl::StrCat("the gradient of '", parameters_[index].name,
                                "' was announced twice in one step; announce it once, after its last contribution"));
  }
  if (!reducing_.load(std::memory_order_relaxed)) return;
  BucketState& bucket = *buckets_[bucket_of_[index]];
  // The last one to come sees what all the others have written.
  if (bucket.pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    std::lock_guard<std::mutex> lock(mutex_);
    bucket.ready = true;
    bucket.times.ready_ns = NowNs() - begin_ns_;
    LaunchReady();
  }
  if (launched_.load(std::memory_order_relaxed) == 0) return;
  // A step of the backward pass is a good moment for this rank's share of what all ranks have announced.
  group_->Progress();
  if (std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock.owns_lock()) NoteDone();
}

// In the order of the plan, so that all ranks make the same calls.
void Model::LaunchReady() {
  for (size_t b = launched_; b < buckets_.size() && buckets_[b]->ready && misuse_.ok(); launched_ = ++b) {
    BucketState& bucket = *buckets_[b];
    bucket.times.launched_ns = NowNs() - begin_ns_;
    absl::StatusOr<Work> work =
        group_->AllReduce(bucket.ranges, bucket.ranges,
                          {.op = options_.op, .nonfinite = options_.nonfinite, .bucket = static_cast<int>(b)});
    if (!work.ok()) {
      misuse_ = work.status();
      return;
    }
    bucket.work = *std::move(work);
  }
}

void Model::NoteDone() {
  for (; done_ < launched_ && buckets_[done_]->work.Done(); ++done_) {
    buckets_[done_]->times.done_ns = NowNs() - begin_ns_;
  }
}

void Model::Misused(absl::string_view what) {
  if (misuse_.ok()) misuse_ = absl::FailedPreconditionError(absl::StrCat("rank ", group_->rank(), ": ", what));
}

absl::Status Model::FinishBackward(Stream) {
  const TraceScope scope(*group_, "FinishBackward");
  std::lock_guard<std::mutex> lock(mutex_);
  BeginStep();
  const int64_t entered = NowNs();
  absl::Status status = misuse_;
  if (status.ok() && reducing_) status = Missing();
  if (!status.ok()) {
    // The peers wait for buckets that will not come: tell them why. A failed group says so itself.
    if (group_->status().ok()) group_->Abort(status);
    WaitForAll().IgnoreError();
  } else if (reducing_) {
    status = WaitForAll();
    if (status.ok()) RecordStatistics(NowNs() - entered);
  }
  EndStep();
  return status;
}

absl::Status Model::Missing() const {
  constexpr size_t kNamed = 8;
  std::string names;
  size_t missing = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (announced_[i].load(std::memory_order_relaxed) != 0) continue;
    if (++missing <= kNamed) absl::StrAppend(&names, missing > 1 ? ", '" : "'", parameters_[i].name, "'");
  }
  if (missing == 0) return absl::OkStatus();
  if (missing > kNamed) absl::StrAppend(&names, " and ", missing - kNamed, " more");
  return absl::FailedPreconditionError(absl::StrCat("rank ", group_->rank(), ": step ", statistics_.steps,
                                                    " ended without a gradient for ", names,
                                                    "; every parameter must be announced in every reduced step"));
}

absl::Status Model::WaitForAll() {
  absl::Status first;
  for (; done_ < launched_; ++done_) {
    BucketState& bucket = *buckets_[done_];
    absl::Status status = bucket.work.Wait();
    if (first.ok()) first = std::move(status);
    bucket.times.done_ns = NowNs() - begin_ns_;
  }
  return first;
}

void Model::EndStep() {
  for (size_t i = 0; i < parameters_.size(); ++i) announced_[i].store(0, std::memory_order_relaxed);
  for (auto& bucket : buckets_) {
    bucket->ready = false;
    bucket->work = Work();
    bucket->pending.store(bucket->parameters, std::memory_order_relaxed);
  }
  misuse_ = absl::OkStatus();
  launched_ = done_ = 0;
  in_step_.store(false, std::memory_order_release);
}

absl::Status Model::Rebind(ProcessGroup& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (in_step_) {
    if (group_->status().ok()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", group_->rank(), ": Rebind in the middle of a step; call it after FinishBackward has returned"));
    }
    WaitForAll().IgnoreError();
    EndStep();
  }
  group_ = &group;
  if (absl::Status s = VerifyParameters(group, AsGiven(), options_); !s.ok()) return s;
  for (const Allocation& memory : grad_memory_) {
    if (absl::Status s = group.Register(memory); !s.ok()) return s;
  }
  Log().info("rank {}: the model goes on in a group of {}", group.rank(), group.size());
  return absl::OkStatus();
}

// The parameters as they were given to Create, without the memory that the library owns.
std::vector<Parameter> Model::AsGiven() const {
  std::vector<Parameter> parameters = parameters_;
  const auto ours = [](const std::vector<Buffer>& spans, const void* data) {
    return std::any_of(spans.begin(), spans.end(), [data](const Buffer& span) {
      const char* const begin = static_cast<const char*>(span.data);
      return data >= begin && data < begin + span.count * SizeOf(span.dtype);
    });
  };
  for (Parameter& p : parameters) {
    if (ours(value_spans_, p.value.data)) p.value.data = nullptr;
    if (ours(grad_spans_, p.grad.data)) p.grad = Buffer{};
  }
  return parameters;
}

void Model::ZeroGrad(Stream) {
  for (const Parameter& p : parameters_) {
    if (p.grad.count > 0) std::memset(p.grad.data, 0, p.grad.count * SizeOf(p.grad.dtype));
  }
}

// --- statistics -----------------------------------------------------------------------------------------------------

void Model::RecordStatistics(int64_t exposed_ns) {
  ++statistics_.steps;
  statistics_.buckets.clear();
  int64_t communication = 0, covered = 0;  // covered: up to where the union of the intervals has been counted
  for (const auto& bucket : buckets_) {
    const BucketTimes& t = bucket->times;
    statistics_.buckets.push_back(t);
    communication += std::max<int64_t>(0, t.done_ns - std::max(t.launched_ns, covered));
    covered = std::max(covered, t.done_ns);
  }
  if (Observer* const observer = group_->observer(); observer != nullptr) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const BucketTimes& t = buckets_[b]->times;
      observer->OnBucket({statistics_.steps, static_cast<int>(b), t.bytes, begin_ns_ + t.ready_ns,
                          begin_ns_ + t.launched_ns, begin_ns_ + t.done_ns});
    }
  }
  statistics_.exposed_ns = std::min(exposed_ns, communication);
  statistics_.communication_ns = communication;
  exposed_sum_ns_ += statistics_.exposed_ns;
  communication_sum_ns_ += communication;
}

DdpStatistics Model::statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  DdpStatistics s = statistics_;
  if (communication_sum_ns_ > 0) {
    s.overlap = 1 - static_cast<double>(exposed_sum_ns_) / static_cast<double>(communication_sum_ns_);
  }
  return s;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DistributedDataParallel>> DistributedDataParallel::Create(
    ProcessGroup& group, std::vector<Parameter> parameters, const DdpOptions& options) {
  if (absl::Status s = VerifyParameters(group, parameters, options); !s.ok()) return s;
  auto model = std::make_unique<Model>(group, std::move(parameters), options);
  if (absl::Status s = model->Build(); !s.ok()) return s;
  return std::unique_ptr<DistributedDataParallel>(std::move(model));
}

}  // namespace ddp
