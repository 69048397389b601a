// SPDX-License-Identifier: Apache-2.0
#include "stream_work.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "ddp/torch/tensor.h"
#include "outcome.h"

namespace ddp_torch {

StreamWork::StreamWork(const at::Device& device, const Title& title, std::vector<at::Tensor> inputs,
                       std::vector<at::Tensor> outputs, Task task, bool async)
    : CollectiveWork(title, std::move(inputs), std::move(outputs), {device}), end_(device.type()) {
  try {
    Begin(device, task, async);
  } catch (...) {
    finish(std::current_exception());
    future_->setError(std::current_exception());
  }
}

void StreamWork::Begin(const at::Device& device, const Task& task, bool async) {
  const at::NoGradGuard no_grad;
  const c10::impl::VirtualGuardImpl gpu(device.type());
  // What follows the operation, and what marks its end, does so in a stream of its own, unless the caller waits.
  const bool aside = async && task.start;
  const c10::Stream stream = aside ? gpu.getStreamFromGlobalPool(device) : gpu.getStream(device);
  if (task.start) pending_ = task.start();
  ThrowIfFailed(pending_.call_status(), rank_, title_.name);
  const c10::StreamGuard guard(stream);
  ThrowIfFailed(pending_.BlockStream(ddp::CurrentStream(device)), rank_, title_.name);
  if (aside) {
    // The allocator must not give the memory to others before this stream has come here.
    for (const at::Tensor& tensor : task.memory) gpu.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    for (const at::Tensor& tensor : task.run ? outputs_ : std::vector<at::Tensor>{}) {
      gpu.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
  }
  if (task.run) task.run();
  end_.record(stream);
  future_->markCompleted(outputs_);
}

void StreamWork::Look(absl::Time deadline) {
  const std::lock_guard<std::mutex> look(look_mutex_);
  if (Work::isCompleted()) return;
  const std::optional<absl::Status> outcome = OutcomeBy(pending_, deadline);
  if (!outcome || (outcome->ok() && !end_.query())) return;
  try {
    ThrowIfFailed(*outcome, rank_, title_.name);
    finish();
  } catch (...) {
    finish(std::current_exception());
  }
}

bool StreamWork::isCompleted() {
  Look(absl::InfinitePast());
  return Work::isCompleted();
}

bool StreamWork::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout != kNoTimeout;
  Look(limited ? absl::Now() + absl::FromChrono(timeout) : absl::InfinitePast());
  {
    const std::lock_guard<std::mutex> look(look_mutex_);
    if (limited && !pending_.Done()) ThrowTimedOut(rank_, title_.name, timeout);
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  future_->wait();
  return true;
}

}  // namespace ddp_torch
