// SPDX-License-Identifier: Apache-2.0
// Creation of a model, and its list of parameters.
#include "libddp/reducer/model.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libddp/base/env.h"
#include "libddp/base/log.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/bucket_size.h"
#include "libddp/reducer/verify.h"

namespace ddp {
namespace {

constexpr size_t kDefaultFirstBucketBytes = size_t{1} << 20;

// These backends form every sum in float32; a hook may do anything.
bool NeedsFloat32Slots(const ProcessGroup& group, const DdpOptions& options) {
  const bool one_host = group.backend() == "hierarchical" || group.backend() == "local";
  return options.reduce_in_float32 && !(one_host && options.hook == nullptr);
}

// What the options leave to the environment.
absl::Status ReadVariables(DdpOptions* options) {
  if (options->check_replicas.has_value()) return absl::OkStatus();
  int64_t every = 0;
  const std::optional<std::string> text = ReadEnv(Env::kCheckReplicas);
  const bool good = !text.has_value() || (absl::SimpleAtoi(*text, &every) && every >= 0);
  options->check_replicas = good ? every : 0;
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("DDP_CHECK_REPLICAS is '", *text, "'; it must be a number of steps, or 0 for never"));
}

// The gradient as Create was told of it, for VerifyModel. Some ranks may have given other memory since, or may have
// freed it: the slot stands for all of that.
Buffer GivenGradient(const Trained& trained) {
  if (trained.owned) return {};
  Buffer grad = trained.parameter.grad;
  if (trained.given_by_step) grad.data = trained.slot.data;
  return grad;
}

Buffer AsBytes(const Buffer& b) { return {b.data, b.count * SizeOf(b.dtype), DType::kUInt8, b.device}; }

}  // namespace

Model::Model(ProcessGroup& group, Device device, const DdpOptions& options)
    : group_(&group),
      options_(options),
      device_(device),
      clip_(std::make_shared<ClipNumbers>()),
      memory_(std::make_unique<ModelMemory>(device, options.copy_gradients, NeedsFloat32Slots(group, options))),
      reducer_(
          &group, options.hook, options.nonfinite, &streams_,
          [this](const Bucket& bucket, Stream stream) { return CopyInBucket(bucket, stream); },
          options.check_nan
              ? [this](const Bucket& bucket, Stream stream) { return nan_check_.Look(bucket, all_, stream); }
              : Reducer::OnBucket()),
      replicas_(options.check_replicas.value_or(0)),
      notes_(static_cast<size_t>(group.size())) {}

absl::Status Model::PrepareGpu() {
  if (absl::Status s = streams_.Create(device_); !s.ok()) return s;
  absl::StatusOr<std::shared_ptr<void>> word = AllocateOn(device_, sizeof(uint32_t));
  if (!word.ok()) return word.status();
  absl::StatusOr<std::shared_ptr<void>> numbers = AllocateOn(device_, sizeof(ClipNumbers));
  if (!numbers.ok()) return numbers.status();
  if (absl::Status s = graph_steps_.Create(device_); !s.ok()) return s;
  skip_step_ = *std::move(word);
  clip_ = std::static_pointer_cast<ClipNumbers>(*std::move(numbers));
  return absl::OkStatus();
}

absl::Status Model::Build(std::vector<Parameter> parameters) {
  if (IsGpu(device_)) {
    if (absl::Status s = Agree(*group_, PrepareGpu()); !s.ok()) return s;
  }
  std::vector<Trained> all;
  all.reserve(parameters.size());
  for (Parameter& p : parameters) all.push_back({std::move(p), {}});
  const std::vector<uint8_t> announced(all.size());
  if (absl::Status s = Adopt(std::move(all), announced); !s.ok()) return s;
  return options_.broadcast_parameters ? Broadcast(ValuesAndBuffers(), 0) : absl::OkStatus();
}

// Makes `all` the list of parameters; `announced` has their values of announced_.
absl::Status Model::Adopt(std::vector<Trained> all, absl::Span<const uint8_t> announced) {
  std::vector<size_t> order(all.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  if (absl::Status s = memory_->Place(*group_, all, order); !s.ok()) return s;
  if (absl::Status s = Take(std::move(all), announced); !s.ok()) return s;
  if (absl::Status s = ChooseCaps(); !s.ok()) return s;
  return PlanAfresh();
}

absl::Status Model::Take(std::vector<Trained> all, absl::Span<const uint8_t> announced) {
  all_ = std::move(all);
  announced_ = std::make_unique<std::atomic<uint8_t>[]>(all_.size());
  std::copy(announced.begin(), announced.end(), announced_.get());
  order_.assign(all_.size(), 0);
  return options_.check_nan ? Agree(*group_, nan_check_.Reset(all_.size(), device_)) : absl::OkStatus();
}

Model::Former Model::KeepList() const {
  Former former = {*memory_, all_, {}, roles_, {}, static_known_, steps_of_list_};
  for (size_t i = 0; i < all_.size(); ++i) former.announced.push_back(announced_[i].load(std::memory_order_relaxed));
  for (const Bucket& b : reducer_.plan()) former.order.insert(former.order.end(), b.items.begin(), b.items.end());
  return former;
}

// After an error that all ranks have had. A hook is prepared for the former buckets again.
absl::Status Model::GoBack(Former former, absl::Status why) {
  if (!group_->status().ok()) return why;
  memory_ = std::make_unique<ModelMemory>(std::move(former.memory));
  absl::Status back = Take(std::move(former.all), former.announced);
  roles_ = std::move(former.roles);
  static_known_ = former.static_known;
  steps_of_list_ = former.steps_of_list;
  if (back.ok()) back = Plan(former.order);
  if (!back.ok()) GiveUp(back);  // on all ranks
  return why;
}

// Without what steps have taught. Gradients are expected in reverse order of the parameters: the last layer's first.
absl::Status Model::PlanAfresh() {
  roles_.clear();
  for (const Trained& t : all_) roles_.push_back(t.parameter.frozen ? Role::kFrozen : Role::kTrained);
  static_known_ = false;
  steps_of_list_ = 0;
  std::vector<size_t> order;
  for (size_t i = all_.size(); i-- > 0;) {
    if (roles_[i] != Role::kFrozen) order.push_back(i);
  }
  return Plan(order);
}

absl::Status Model::ChooseCaps() {
  size_t bucket = options_.bucket_bytes, first = options_.first_bucket_bytes;
  std::optional<size_t> last;
  if (bucket == DdpOptions::kAutoBucketBytes) {
    if (caps_.bucket.others != 0) return absl::OkStatus();  // the group is as it was
    size_t bytes = 0;
    for (const Trained& t : all_) bytes += t.slot.count * SizeOf(t.slot.dtype);
    absl::StatusOr<LinkModel> link = MeasureLink(*group_, device_);
    if (!link.ok()) return link.status();
    bucket = BestBucketBytes(*link, bytes);
    if (first == 0) first = std::min(bucket, kDefaultFirstBucketBytes);
    last = std::clamp(LatencyInBytes(*link), first, std::max(first, bucket));
    LogInfo("rank ", group_->rank(), ": an all-reduce takes ", absl::StrFormat("%.1f", link->latency_ns / 1000),
            " us + ", absl::StrFormat("%.3f", link->ns_per_byte), " ns a byte: buckets of ", bucket, " bytes");
  }
  if (first == 0) first = bucket == DdpOptions::kDefaultBucketBytes ? kDefaultFirstBucketBytes : bucket;
  // An operation of NCCL's takes the host tens of microseconds, which small models' steps do not have.
  if (!last.has_value()) last = group_->backend() == "nccl" ? bucket : first;
  caps_ = {{first, bucket, *last}, options_.piece_bytes};
  return absl::OkStatus();
}

absl::Status Model::Plan(absl::Span<const size_t> order) {
  statistics_.CountPlan();
  return reducer_.Plan(all_, order, *memory_, caps_);
}

std::vector<Buffer> Model::ValuesAndBuffers() const {
  std::vector<Buffer> all;
  for (const Trained& t : all_) all.push_back(t.parameter.value);
  for (const ModelBuffer& b : options_.buffers) all.push_back(b.data);
  return all;
}

// All of it in one operation for each kind of device, whatever the types. A GPU's comes behind `stream`, which waits
// for it; where none is given, behind the program's last one, and the host waits.
absl::Status Model::Broadcast(absl::Span<const Buffer> buffers, int root, Stream stream) {
  const absl::StatusOr<Stream> after = streams_.Follow(stream);
  if (!after.ok()) return after.status();
  for (const Device::Kind kind : {Device::Kind::kCpu, Device::Kind::kCuda}) {
    std::vector<Buffer> bytes;
    for (const Buffer& b : buffers) {
      if (b.count > 0 && b.device.kind == kind) bytes.push_back(AsBytes(b));
    }
    if (bytes.empty()) continue;
    Work work = group_->Broadcast(bytes, root, IsGpu(after->device) ? *after : kNoStream);
    const bool ordered = kind == Device::Kind::kCuda && IsGpu(stream.device);
    if (absl::Status s = ordered ? work.BlockStream(stream) : work.Wait(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

Model::~Model() {
  if (!owner_.IsHere()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!in_step_) reducer_.Drain().IgnoreError();
  if (!in_step_ || !reducing_) WarnOfLostGradients();
  // The peers of a reduced step wait for this rank, whether or not it has launched anything.
  const bool expected = in_step_ && reducing_;
  if (expected || reducer_.Pending() || !meeting_work_.Done() || !used_work_.Done()) {
    // The others may have had all that they need of this rank, and see no failure.
    if (group_->status().ok()) {
      LogError("rank ", group_->rank(), ": a DistributedDataParallel was destroyed in the middle of step ",
               StepsSoFar() + 1, "; call FinishBackward after every backward pass, also after the last one");
    }
    group_->Abort(absl::AbortedError("a DistributedDataParallel was destroyed in the middle of a step"));
    Abandon();
  }
  if (streams_.on_gpu()) {
    graph_steps_.Forsake();
    LeaveGpu();
  } else {
    FinishReplicaCheck().IgnoreError();  // it logs what it has found
  }
}

// The model's memory goes: its own stream must be through with it. In a group that works this ends with the operations,
// but a kernel of the program's, or of a hook, may hang there: it gets as long as an operation does. After a failure
// the stream may be waiting for what never comes. Then, and where nobody knows, it keeps the memory.
void Model::LeaveGpu() {
  const int64_t begin_ns = NowNs(), longest_ns = absl::ToInt64Nanoseconds(group_->timeout());
  int64_t failed_ns = 0;
  const auto give_up = [&] {
    const int64_t now = NowNs();
    if (failed_ns == 0 && !group_->status().ok()) failed_ns = now;
    return now - begin_ns > longest_ns || (failed_ns != 0 && now - failed_ns > kLeaveFailedNs);
  };
  absl::Status through = Synchronize(streams_.own(), give_up);
  // An error of the wait itself says nothing of the stream.
  if (!through.ok() && !absl::IsDeadlineExceeded(through)) through = Synchronize(streams_.own(), give_up);
  // It logs what it has found.
  if (through.ok() && !absl::IsDeadlineExceeded(FinishReplicaCheck(give_up))) return;
  LogError("rank ", group_->rank(), ": a DistributedDataParallel was destroyed while GPU ", device_.index,
           " still waits for a stream of the program's or for a failed operation; its memory is kept");
  KeepForever(std::shared_ptr<ModelMemory>(std::move(memory_)));
  KeepForever(std::make_shared<std::vector<Trained>>(std::move(all_)));
  KeepForever(skip_step_);
  KeepForever(clip_);
  replicas_.Forsake();
  nan_check_.Forsake();
  reducer_.Forsake();
  streams_.Forsake();
}

// Waits for what is under way, whatever becomes of it: then no operation has our memory any more.
void Model::Abandon() {
  reducer_.Abandon().IgnoreError();
  replicas_.Drop();
  meeting_work_.Wait().IgnoreError();
  used_work_.Wait().IgnoreError();
}

absl::Status Model::SetParameters(std::vector<Parameter> parameters) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<absl::string_view, size_t> known;
  for (size_t i = 0; i < all_.size(); ++i) known.emplace(all_[i].parameter.name, i);
  absl::Status mine;
  if (in_step_) mine = absl::FailedPreconditionError("SetParameters in the middle of a step");
  if (join_.has_value() && !join_over_) mine = absl::FailedPreconditionError("SetParameters inside of a Join");

  std::vector<Trained> next;
  std::vector<bool> stays(all_.size()), trains_on(all_.size());
  std::vector<size_t> added;
  std::vector<uint8_t> announced(parameters.size());  // within an accumulation: what stays trained stays announced
  for (Parameter& p : parameters) {
    const auto found = known.find(p.name);
    if (found == known.end() || stays[found->second]) {
      added.push_back(next.size());
      next.push_back({p, {}});
      continue;
    }
    const Trained& old = all_[found->second];
    stays[found->second] = true;
    if (p.value.count != old.parameter.value.count || p.value.dtype != old.parameter.value.dtype) {
      mine.Update(absl::InvalidArgumentError(absl::StrCat(
          "parameter '", p.name, "' had ", old.parameter.value.count, " elements of ", Name(old.parameter.value.dtype),
          " and now has ", p.value.count, " of ", Name(p.value.dtype), "; give it another name")));
    }
    trains_on[found->second] = !p.frozen;
    if (!p.frozen) announced[next.size()] = announced_[found->second].load(std::memory_order_relaxed);
    next.push_back(old);
    next.back().parameter.frozen = p.frozen;
    if (!p.shape.empty()) next.back().parameter.shape = p.shape;
    p.value = old.parameter.value;
    p.grad = GivenGradient(old);
  }
  if (absl::Status s = VerifyModel(*group_, parameters, options_, mine); !s.ok()) return s;
  if (absl::Status s = FinishReplicaCheck(); !s.ok()) return s;

  const absl::StatusOr<Stream> stream = streams_.Follow({});
  const auto agreed = [this](const absl::Status& status) {
    const absl::Status named = Named("SetParameters", status);
    return IsGpu(device_) ? Agree(*group_, named) : named;
  };
  if (absl::Status s = agreed(stream.status()); !s.ok()) return s;
  if (absl::Status s = reducer_.Drain(); !s.ok()) return s;  // it may be working in memory that goes
  std::vector<Buffer> leaving;                               // no rank reduces them any more, but spans have them
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].owned && !trains_on[i]) leaving.push_back(all_[i].parameter.grad);
  }
  Former former = KeepList();
  if (absl::Status s = Adopt(std::move(next), announced); !s.ok()) return GoBack(std::move(former), std::move(s));
  absl::Status zeroed = Zero(leaving, *stream);
  if (zeroed.ok()) zeroed = streams_.Complete(*stream);
  if (absl::Status s = agreed(zeroed); !s.ok()) return s;
  if (!options_.broadcast_parameters) return absl::OkStatus();
  std::vector<Buffer> values;
  values.reserve(added.size());
  for (const size_t i : added) values.push_back(all_[i].parameter.value);
  return Broadcast(values, 0);
}

absl::Status Model::Rebind(ProcessGroup& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!group_->status().ok()) {
    Abandon();
    reducing_ = true;  // nothing that was announced counts any more
    EndStep();
  } else if (in_step_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", group_->rank(), ": Rebind in the middle of a step; call it after FinishBackward has returned"));
  }
  replicas_.Reset();
  const absl::Status reset = reducer_.Rebind(&group);
  group_ = &group;
  watched_.clear();
  notes_.resize(static_cast<size_t>(group.size()));
  std::vector<Parameter> given;  // as it was given to Create, without the memory that the library owns
  for (const Trained& t : all_) {
    given.push_back(t.parameter);
    if (t.value_owned) given.back().value.data = nullptr;
    given.back().grad = GivenGradient(t);
  }
  if (absl::Status s = VerifyModel(group, given, options_, reset); !s.ok()) return s;
  if (absl::Status s = memory_->Register(group, all_); !s.ok()) return s;
  // The last step may have succeeded on some ranks only, and so may what it taught them. From here on all do the same.
  int64_t steps = StepsSoFar();
  if (absl::Status s = ddp::BroadcastValues(group, absl::MakeSpan(&steps, 1), 0); !s.ok()) return s;
  statistics_.SetSteps(steps - graph_steps_.replays());
  last_was_reduced_ = true;
  last_active_ = 0;  // a rank of the earlier group
  if (absl::Status s = PlanAfresh(); !s.ok()) return s;
  LogInfo("rank ", group.rank(), ": the model goes on in a group of ", group.size());
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DistributedDataParallel>> DistributedDataParallel::Create(
    ProcessGroup& group, std::vector<Parameter> parameters, const DdpOptions& options) {
  DdpOptions complete = options;
  const absl::Status read = ReadVariables(&complete);
  if (absl::Status s = VerifyModel(group, parameters, complete, read); !s.ok()) return s;
  auto model = std::make_unique<Model>(group, parameters[0].value.device, complete);
  if (absl::Status s = model->Build(std::move(parameters)); !s.ok()) return NameRank(group, "Create", s);
  return std::unique_ptr<DistributedDataParallel>(std::move(model));
}

}  // namespace ddp
