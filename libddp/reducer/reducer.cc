// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/reducer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/log.h"
#include "libddp/base/owner_process.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/layout.h"
#include "libddp/reducer/without_exceptions.h"

namespace ddp {
namespace {

absl::Status StatusOf(const absl::Status& status) { return status; }
absl::Status StatusOf(const Work& work) { return work.call_status(); }

// What of a bucket's array belongs to no gradient.
std::vector<Buffer> GapsOf(const GradBucket& view) {
  std::vector<std::pair<size_t, size_t>> taken = {{view.buffer.count, 0}};  // offset and count
  for (const GradBucket::Gradient& g : view.gradients) taken.emplace_back(g.offset, g.count);
  std::sort(taken.begin(), taken.end());
  std::vector<Buffer> gaps;
  size_t end = 0;
  for (const auto& [offset, count] : taken) {
    if (offset > end) {
      char* const data = static_cast<char*>(view.buffer.data) + end * SizeOf(view.buffer.dtype);
      gaps.push_back({data, offset - end, view.buffer.dtype, view.buffer.device});
    }
    end = std::max(end, offset + count);
  }
  return gaps;
}

}  // namespace

// --- the plan -------------------------------------------------------------------------------------------------------

absl::Status Reducer::Plan(const std::vector<Trained>& all, absl::Span<const size_t> order, const ModelMemory& memory,
                           const Caps& caps) {
  End();
  // What is under way may be working in memory of the hook's.
  if (hook_ != nullptr) {
    if (absl::Status s = Drain(); !s.ok()) return s;
  }
  std::vector<BucketItem> items;
  items.reserve(all.size());
  for (const Trained& t : all) items.push_back({t.slot.dtype, t.slot.count * SizeOf(t.slot.dtype)});
  plan_ = PlanBuckets(items, order, caps.bucket);
  buckets_.clear();
  bucket_of_.assign(all.size(), 0);
  auto names = std::make_shared<BucketNames>(plan_.size());
  for (const Bucket& planned : plan_) {
    auto bucket = std::make_unique<BucketState>();
    std::vector<Buffer> slots;
    for (const size_t i : planned.items) {
      bucket_of_[i] = buckets_.size();
      (*names)[buckets_.size()].push_back(all[i].parameter.name);
      slots.push_back(all[i].slot);
      bucket->copied |= all[i].copied();
      bucket->view.gradients.push_back({i, all[i].parameter.name, all[i].parameter.shape, 0, all[i].slot.count});
    }
    bucket->ranges = memory.Merge(slots);
    if (bucket->ranges.empty()) bucket->ranges.push_back(slots[0]);  // nothing but empty gradients
    bucket->pieces = CutPieces(bucket->ranges, caps.piece);
    bucket->times.bytes = planned.bytes;
    bucket->times.gradients = planned.items.size();
    bucket->times.ranges = bucket->ranges.size();
    bucket->view.index = buckets_.size();
    bucket->view.is_last = buckets_.size() + 1 == plan_.size();
    LogDebug("rank ", group_->rank(), ": bucket ", buckets_.size(), ": ", planned.items.size(), " gradients, ",
             planned.bytes, " bytes, ", bucket->ranges.size(), " ranges");
    buckets_.push_back(std::move(bucket));
  }
  names_ = std::move(names);
  End();  // makes the buckets ready for a step
  return hook_ == nullptr ? absl::OkStatus() : PrepareHook(all);
}

// Hooks see one array for each bucket: the ranges themselves if there is only one, else a copy.
absl::Status Reducer::PrepareHook(const std::vector<Trained>& all) {
  size_t copies = 0;
  for (const auto& bucket : buckets_) {
    bucket->packed = bucket->ranges.size() > 1;
    if (bucket->packed) copies += Scratch::Room(Elements(bucket->ranges) * SizeOf(bucket->ranges[0].dtype));
  }
  if (absl::Status s = packed_.Reserve(*group_, copies, streams_.device()); !s.ok()) return s;
  std::vector<GradBucket> views;
  for (const auto& bucket : buckets_) {
    const DType dtype = bucket->ranges[0].dtype;
    GradBucket& view = bucket->view;
    view.buffer = bucket->ranges[0];
    if (bucket->packed) view.buffer = packed_.Take(dtype, Elements(bucket->ranges));
    for (GradBucket::Gradient& gradient : view.gradients) {
      const char* const data = static_cast<const char*>(all[gradient.parameter].slot.data);
      size_t before = 0;  // elements of earlier ranges
      for (const Buffer& range : bucket->ranges) {
        const char* const begin = static_cast<const char*>(range.data);
        if (gradient.count > 0 && data >= begin && data < begin + range.count * SizeOf(dtype)) {
          gradient.offset = before + static_cast<size_t>(data - begin) / SizeOf(dtype);
        }
        before += range.count;
      }
    }
    bucket->gaps = GapsOf(view);
    views.push_back(view);
  }
  return Agree(*group_, WithoutExceptions([this] { return hook_name_; },
                                          [&] {
                                            hook_name_ = absl::StrCat("hook ", hook_->name());
                                            rounds_ = hook_->rounds();
                                            return hook_->Prepare(*group_, views);
                                          }));
}

absl::Status Reducer::CanCapture() const {
  if (hook_ == nullptr) return absl::OkStatus();
  return WithoutExceptions([this] { return hook_name_; },
                           [this] {
                             const absl::Status status = hook_->CanCapture();
                             if (status.ok()) return status;
                             return absl::Status(status.code(), absl::StrCat(hook_name_, ": ", status.message()));
                           });
}

absl::Status Reducer::Rebind(ProcessGroup* group) {
  Drain().IgnoreError();  // of the earlier group
  group_ = group;
  packed_ = Scratch();
  if (hook_ == nullptr) return absl::OkStatus();
  return WithoutExceptions([this] { return hook_name_; },
                           [this] {
                             hook_->Reset();
                             return absl::OkStatus();
                           });
}

// --- the step -------------------------------------------------------------------------------------------------------

void Reducer::Begin(int64_t begin_ns) {
  begin_ns_ = begin_ns;
  scaled_ = false;
}

void Reducer::Ready(size_t parameter) {
  BucketState& bucket = *buckets_[bucket_of_[parameter]];
  bucket.ready = true;
  bucket.times.ready_ns = NowNs() - begin_ns_;
}

void Reducer::SetScale(const StepScale& scale, int64_t step) {
  scale_ = scale;
  if (hook_ == nullptr) scale_.reduce.nonfinite = nonfinite_;
  step_ = step;
  scaled_ = true;
}

bool Reducer::InRounds() const {
  return hook_ != nullptr && launched() > 0 && buckets_[launched() - 1]->round < rounds_;
}

// Buckets are launched in the order of the plan, and one has begun all its operations before the next begins any, so
// that all ranks make the same calls.
void Reducer::Advance(Stream stream) {
  while (scaled_ && status_.ok()) {
    if (InRounds()) {
      BucketState& last = *buckets_[launched() - 1];
      if (!streams_.on_gpu() && !last.Done()) break;
      status_ = Collect(last, streams_.own());
      if (status_.ok()) StartRound(last);
    } else if (launched() < buckets_.size() && buckets_[launched()]->ready) {
      Launch(stream);
    } else {
      break;
    }
  }
  if (streams_.on_gpu()) return;
  while (done_ + (InRounds() ? 1 : 0) < launched() && status_.ok() && buckets_[done_]->Done()) {
    Complete(*buckets_[done_], stream);
    ++done_;
  }
}

absl::Status Reducer::IssueAll(Stream stream) {
  while (status_.ok() && (InRounds() || launched() < buckets_.size())) {
    if (InRounds()) {
      BucketState& last = *buckets_[launched() - 1];
      status_ = Collect(last, streams_.own());
      if (status_.ok()) StartRound(last);
    } else {
      Launch(stream);
    }
  }
  return status_;
}

absl::Status Reducer::WaitAll(Stream stream) {
  if (!streams_.on_gpu()) {
    for (; done_ < launched() && status_.ok(); ++done_) Complete(*buckets_[done_], stream);
    return status_;
  }
  if (!TimedAtLaunch()) {
    for (size_t b = 0; b < launched(); ++b) status_.Update(TellTimer(b));
  }
  if (step_timer_ != nullptr) step_timer_->BeginWait(stream);
  const absl::StatusOr<bool> capturing = streams_.Capturing(stream);
  status_.Update(capturing.status());
  capturing_ = capturing.value_or(false);
  status_.Update(streams_.JoinOwn(stream));
  if (hook_ != nullptr) {
    for (; done_ < launched() && status_.ok(); ++done_) Complete(*buckets_[done_], stream);
  } else if (status_.ok() && launched() > 0) {
    // Operations of a group take effect in the order of the calls: behind the last one all are done.
    status_ = buckets_[launched() - 1]->works.back().BlockStream(stream);
    done_ = launched();
  }
  if (step_timer_ != nullptr) status_.Update(step_timer_->EndWait(stream));
  return status_;
}

absl::Status Reducer::Abandon() {
  absl::Status first;
  for (size_t b = 0; b < launched(); ++b) {
    for (Work& work : buckets_[b]->works) first.Update(work.Wait());
  }
  return first;
}

absl::Status Reducer::Drain() {
  absl::Status first;
  for (Work& work : in_flight_) first.Update(work.Wait());
  in_flight_.clear();
  return first;
}

void Reducer::End() {
  if (step_timer_ != nullptr) step_timer_->Drop();
  step_timer_ = &timer_;
  // What was captured has not run, and when it will the Works do not tell.
  if (std::exchange(capturing_, false)) {
    in_flight_.clear();
  } else if (streams_.on_gpu() && launched() > 0) {
    in_flight_.clear();
    for (size_t b = hook_ == nullptr ? launched() - 1 : 0; b < launched(); ++b) {
      if (!buckets_[b]->works.empty()) in_flight_.push_back(buckets_[b]->works.back());
    }
  }
  for (const auto& bucket : buckets_) {
    bucket->ready = false;
    bucket->round = 0;
    bucket->works.clear();
    bucket->pending.store(static_cast<int>(bucket->times.gradients), std::memory_order_relaxed);
  }
  launched_ = done_ = 0;
  scaled_ = false;
  status_ = absl::OkStatus();
  streams_.Reset();
}

void Reducer::Forsake() {
  KeepForever(std::make_shared<GpuTimer>(std::move(timer_)));
  KeepForever(std::make_shared<Scratch>(std::move(packed_)));
  KeepForever(hook_);  // which may have memory on the GPU, too
}

bool Reducer::Pending() const {
  return std::any_of(buckets_.begin(), buckets_.end(), [](const auto& bucket) { return !bucket->Done(); });
}

std::vector<BucketTimes> Reducer::times() const {
  std::vector<BucketTimes> times;
  times.reserve(buckets_.size());
  for (const auto& bucket : buckets_) times.push_back(bucket->times);
  return times;
}

// --- one bucket -----------------------------------------------------------------------------------------------------

void Reducer::Launch(Stream stream) {
  BucketState& bucket = *buckets_[launched()];
  bucket.times.launched_ns = NowNs() - begin_ns_;
  bucket.times.operations = 0;
  if (streams_.on_gpu()) {
    const absl::StatusOr<Stream> behind =
        streams_.Behind(hook_ != nullptr || scale_.local != 1 || bucket.copied || inspect_ != nullptr);
    status_ = behind.status();
    if (!status_.ok()) return;
    stream = *behind;
    if (bucket.copied) status_ = copy_in_(plan_[launched()], stream);
    if (!status_.ok()) return;
    if (step_timer_ != nullptr) step_timer_->Launched(launched(), stream);
  }
  // 0 times what is not finite would be NaN.
  if (scale_.local != 0 && inspect_ != nullptr) status_ = inspect_(plan_[launched()], stream);
  if (!status_.ok()) return;
  if (scale_.local == 0) {
    status_ = Zero(bucket.ranges, stream);
  } else if (scale_.local != 1) {
    status_ = CopyScaled(bucket.ranges, bucket.ranges, scale_.local, stream);
  }
  if (!status_.ok()) return;
  scale_.reduce.bucket = static_cast<int>(launched());
  launched_.fetch_add(1, std::memory_order_relaxed);
  if (hook_ == nullptr) {
    for (const std::vector<Buffer>& piece : bucket.pieces) {
      bucket.works.push_back(group_->AllReduce(piece, piece, scale_.reduce, stream));
      status_ = bucket.works.back().call_status();
      if (!status_.ok()) return;
    }
    bucket.times.operations = bucket.pieces.size();
    if (TimedAtLaunch()) status_ = TellTimer(launched() - 1);
    return;
  }
  bucket.view.step = step_;
  bucket.view.reduce = scale_.reduce;
  bucket.view.share = scale_.share;
  bucket.view.stream = stream;
  if (bucket.packed) status_ = CopyScaled(bucket.ranges, bucket.view.buffer, 1, stream);
  if (status_.ok()) StartRound(bucket);
}

// At once: a mark that the host sets at the step's end may be later than the reduction's, since a short backward pass
// runs no faster than the host submits it. But a hook's Work may make the host wait, and the first mark behind an
// operation that is captured ends the sequence.
bool Reducer::TimedAtLaunch() const {
  return streams_.on_gpu() && hook_ == nullptr && step_timer_ != nullptr && !step_timer_->captured();
}

absl::Status Reducer::TellTimer(size_t b) {
  const BucketState& bucket = *buckets_[b];
  if (step_timer_ == nullptr || bucket.works.empty()) return absl::OkStatus();
  return step_timer_->Done(b, bucket.times, bucket.works.back());
}

std::string Reducer::Where(const BucketState& bucket) const {
  return absl::StrCat("rank ", group_->rank(), ": step ", step_ + 1, ", bucket ", bucket.view.index, ": ", hook_name_);
}

// Says whose error it is. It may be of a group of the hook's own, which has other numbers for its ranks.
absl::Status Reducer::OfHook(const BucketState& bucket, const absl::Status& error) const {
  if (error.ok()) return error;
  const absl::Status group = group_->status();
  if (!group.ok()) return WithRanksOf(group, error);
  return absl::Status(error.code(), absl::StrCat(Where(bucket), ": ", error.message()));
}

// Calls a hook; turns an exception into a status, and says whose error it is.
template <typename Fn>
auto Reducer::Call(const BucketState& bucket, Fn&& fn) -> decltype(fn()) {
  return WithoutExceptions([&] { return Where(bucket); },
                           [&]() -> decltype(fn()) {
                             auto result = fn();
                             const absl::Status status = StatusOf(result);
                             if (status.ok()) return result;
                             return OfHook(bucket, status);
                           });
}

void Reducer::StartRound(BucketState& bucket) {
  Work work = Call(bucket, [&] { return hook_->Start(*group_, bucket.view, bucket.round); });
  ++bucket.round;
  status_ = work.call_status();
  if (!status_.ok()) return;
  ++bucket.times.operations;
  bucket.works.push_back(std::move(work));
}

// Waits for the operations begun; on a GPU the stream does. The first failure of them.
absl::Status Reducer::Collect(BucketState& bucket, Stream stream) {
  absl::Status first;
  int64_t ended_ns = 0;
  for (Work& work : bucket.works) {
    first.Update(streams_.on_gpu() ? work.BlockStream(stream) : work.Wait());
    ended_ns = std::max(ended_ns, work.ended_ns());
  }
  bucket.times.done_ns = (ended_ns == 0 ? NowNs() : ended_ns) - begin_ns_;
  // A GPU's are kept: they say when all is over.
  if (!streams_.on_gpu()) bucket.works.clear();
  return hook_ == nullptr ? first : OfHook(bucket, first);
}

void Reducer::Complete(BucketState& bucket, Stream stream) {
  status_.Update(Collect(bucket, stream));
  if (hook_ == nullptr || !status_.ok()) return;
  bucket.view.stream = stream;
  status_ = Call(bucket, [&] { return hook_->Finish(bucket.view); });
  // A hook may leave something there, which would be summed, and count in norms, in every later step.
  if (status_.ok() && !bucket.gaps.empty()) status_ = Zero(bucket.gaps, stream);
  if (status_.ok() && nonfinite_ != nullptr) status_ = CheckFinite(bucket.view.buffer, nonfinite_, stream);
  if (status_.ok() && bucket.packed) status_ = CopyScaled(bucket.view.buffer, bucket.ranges, 1, stream);
  bucket.times.done_ns = NowNs() - begin_ns_;
}

}  // namespace ddp
