// SPDX-License-Identifier: Apache-2.0
#include "work.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp_torch {
namespace {

const char* Remedy(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kDeadlineExceeded:
      return ". Timed out waiting for other ranks: look at what they were doing, or give init_process_group a longer "
             "timeout";
    case absl::StatusCode::kUnavailable:
      return ". Connection closed by a peer that has ended: look at its output, and start the program again";
    case absl::StatusCode::kInvalidArgument:
      return ". Nothing has happened: correct the call";
    case absl::StatusCode::kFailedPrecondition:
      return "";  // the text says it
    default:
      return ". The group has failed: make a new one, or start the program again";
  }
}

}  // namespace

void ThrowIfFailed(const absl::Status& status, int rank, const char* operation) {
  if (status.ok()) return;
  C10_THROW_ERROR(DistBackendError,
                  absl::StrCat("[Rank ", rank, "] ", operation, ": ", status.message(), Remedy(status)));
}

void ThrowTimedOut(int rank, const char* operation, std::chrono::milliseconds timeout) {
  C10_THROW_ERROR(DistBackendError, absl::StrCat("[Rank ", rank, "] ", operation,
                                                 ": Timed out: Operation timed out! It has not finished within the ",
                                                 timeout.count(), " ms that wait() was given; it goes on."));
}

CollectiveWork::CollectiveWork(const Title& title, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                               std::vector<c10::Device> gpus)
    : Work(title.rank, title.type, title.name, inputs),
      title_(title),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::move(gpus))) {}

QueuedWork::QueuedWork(std::shared_ptr<Queue> queue, const Title& title, std::vector<at::Tensor> inputs,
                       std::vector<at::Tensor> outputs, Task task)
    : CollectiveWork(title, std::move(inputs), std::move(outputs), {}),
      queue_(std::move(queue)),
      task_(std::move(task)) {}

void QueuedWork::Issue() {
  issued_ = true;
  if (task_.start) pending_ = task_.start();
}

void QueuedWork::Execute() try {
  const at::NoGradGuard no_grad;
  if (!issued_) Issue();
  ThrowIfFailed(pending_.Wait(), rank_, title_.name);
  if (task_.run) task_.run();
} catch (...) {
  error_ = std::current_exception();
}

void QueuedWork::Complete() {
  task_ = {};
  finish(error_);
  if (error_) {
    future_->setError(error_);
  } else {
    future_->markCompleted(outputs_);
  }
  queue_ = nullptr;
}

bool QueuedWork::wait(std::chrono::milliseconds timeout) {
  std::shared_ptr<Queue> queue;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!completed_) queue = queue_;
  }
  if (timeout == kNoTimeout) {
    if (queue != nullptr) queue->Help(*this);
    return Work::wait();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (!cv_.wait_for(lock, timeout, [this] { return completed_; })) ThrowTimedOut(rank_, title_.name, timeout);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

}  // namespace ddp_torch
