// SPDX-License-Identifier: Apache-2.0
#include "backend.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10d_store.h"
#include "stream_work.h"
#include "tensors.h"

namespace ddp_torch {

using std::chrono::milliseconds;

DdpBackend::DdpBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout)
    : Backend(rank, size), store_(store), options_(c10::make_intrusive<Options>("ddp", timeout)) {
  cpu_ = MakeContext("cpu", ddp::Device{});
  if (size > 1) {
    C10dStore messages(c10::make_intrusive<c10d::PrefixStore>("messages", store_));
    announcements_ = std::make_unique<Announcements>(messages, rank, size, timeout);
  }
  init();
}

DdpBackend::~DdpBackend() { queue_->Stop(); }

std::unique_ptr<ddp::Context> DdpBackend::MakeContext(const std::string& prefix, ddp::Device device) {
  ddp::ContextOptions options;
  options.rank = rank_;
  options.world_size = size_;
  options.store = std::make_shared<C10dStore>(c10::make_intrusive<c10d::PrefixStore>(prefix, store_));
  options.device = device;
  options.timeout = absl::FromChrono(options_->timeout);
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
  ThrowIfFailed(context.status(), rank_, "ddp:init_process_group");
  return *std::move(context);
}

ddp::ProcessGroup& DdpBackend::GroupOf(const at::Device& device) {
  const absl::StatusOr<ddp::Device> place = ddp::DeviceOf(device);
  Require(place.ok(), std::string(place.status().message()));
  if (place->kind == ddp::Device::Kind::kCpu) return cpu_->world();
  const std::lock_guard<std::mutex> lock(contexts_mutex_);
  std::unique_ptr<ddp::Context>& context = gpus_[place->index];
  // The ranks use GPUs of different numbers, so the key in the store does not name one.
  if (context == nullptr) context = MakeContext(absl::StrCat("gpu", gpus_.size()), *place);
  return context->world();
}

ddp::ProcessGroup& DdpBackend::GroupFor(const at::Device& device, milliseconds timeout) {
  ddp::ProcessGroup& group = GroupOf(device);
  const absl::Duration wanted = absl::FromChrono(timeout == c10d::kUnsetTimeout ? options_->timeout : timeout);
  if (group.timeout() != wanted) ThrowIfFailed(group.SetTimeout(wanted), rank_, "ddp:set_timeout");
  return group;
}

void DdpBackend::abort() {
  const absl::Status why = absl::AbortedError(absl::StrCat("rank ", rank_, " has called abort()"));
  cpu_->world().Abort(why);
  const std::lock_guard<std::mutex> lock(contexts_mutex_);
  for (const auto& [index, context] : gpus_) context->world().Abort(why);
}

at::Tensor DdpBackend::allocateTensor(long size, at::TensorOptions options) {
  Require(options.device().is_cpu(), "ddp:allocate_tensor: only memory of the CPU can be shared; leave the device out");
  if (size == 0) return at::empty({0}, options);
  auto memory = std::make_shared<ddp::Allocation>();
  Task task;
  task.run = [this, memory, bytes = static_cast<size_t>(size) * options.dtype().itemsize()] {
    absl::StatusOr<ddp::Allocation> shared = cpu_->world().Allocate(bytes, ddp::Device{});
    if (absl::IsResourceExhausted(shared.status())) return;  // on all ranks
    ThrowIfFailed(shared.status(), rank_, "ddp:allocate_tensor");
    *memory = *std::move(shared);
  };
  // In the order of the operations, as all that the ranks do together.
  Submit({c10d::OpType::UNKNOWN, "ddp:allocate_tensor", c10d::kUnsetTimeout, false}, at::kCPU, {}, {}, std::move(task))
      ->wait();
  // DistributedDataParallel goes on with ordinary memory, which only costs copies.
  if (memory->data() == nullptr) return at::empty({size}, options);
  return at::from_blob(
      memory->data(), {size}, [memory](void*) {}, options);
}

WorkPtr DdpBackend::Submit(const Operation& operation, const at::Device& device, Tensors inputs, Tensors outputs,
                           Task task) {
  const milliseconds timeout = operation.timeout == c10d::kUnsetTimeout ? options_->timeout : operation.timeout;
  const Title title{rank_, operation.type, operation.title, ++sequence_, timeout};
  if (device.is_cuda()) {
    return c10::make_intrusive<StreamWork>(device, title, std::move(inputs), std::move(outputs), std::move(task),
                                           operation.async);
  }
  auto work = c10::make_intrusive<QueuedWork>(queue_, title, std::move(inputs), std::move(outputs), std::move(task));
  queue_->Submit(work, !operation.async);
  return work;
}

WorkPtr DdpBackend::barrier(const c10d::BarrierOptions& opts) {
  const Operation operation{c10d::OpType::BARRIER, "ddp:barrier", opts.timeout, opts.asyncOp};
  // As with NCCL, a rank that waits for a barrier has come there with its GPU, too.
  if (!opts.asyncOp) {
    const std::lock_guard<std::mutex> lock(contexts_mutex_);
    for (const auto& [index, context] : gpus_) {
      const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
      gpu.synchronizeStream(gpu.getStream(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index))));
    }
  }
  return Submit(operation, at::kCPU, {}, {},
                {.start = [this, timeout = opts.timeout] { return GroupFor(at::kCPU, timeout).Barrier(); }});
}

// In the store and not in the group, which a missing rank would fail for all.
void DdpBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all) {
  const milliseconds timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
  C10dStore store(c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("monitored/", monitored_barriers_++), store_));
  const absl::Time deadline = absl::Now() + absl::FromChrono(timeout);
  if (rank_ != 0) {
    ThrowIfFailed(store.Set(absl::StrCat(rank_), "here", deadline), rank_, "ddp:monitoredBarrier");
    // Rank 0 may have begun later, and then waits for its whole time-out.
    const absl::StatusOr<std::string> news = store.Get("done", deadline + absl::FromChrono(timeout));
    if (news.ok() && news->empty()) return;
    C10_THROW_ERROR(
        DistBackendError,
        absl::StrCat(
            "Rank ", rank_,
            " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
            "Please check rank 0 logs for faulty rank. ",
            news.ok() ? *news : std::string(news.status().message())));
  }
  std::vector<int> missing;
  for (int rank = 1; rank < size_ && (wait_all || missing.empty()); ++rank) {
    if (!store.Get(absl::StrCat(rank), deadline).ok()) missing.push_back(rank);
  }
  std::string failure;
  if (timeout.count() <= 0) {
    failure = "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms. Give it a longer timeout";
  } else if (!missing.empty()) {
    failure = absl::StrCat("[Rank 0]: Rank", missing.size() > 1 ? "s " : " ", absl::StrJoin(missing, ", "),
                           " failed to pass monitoredBarrier in ", timeout.count(), " ms. Look at what ",
                           missing.size() > 1 ? "they were" : "it was", " doing");
  }
  ThrowIfFailed(store.Set("done", failure, absl::Now() + absl::FromChrono(timeout)), rank_, "ddp:monitoredBarrier");
  if (!failure.empty()) C10_THROW_ERROR(DistBackendError, failure);
}

}  // namespace ddp_torch
