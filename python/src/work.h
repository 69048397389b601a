// SPDX-License-Identifier: Apache-2.0
// An operation of the backend.
#ifndef DDP_PYTHON_SRC_WORK_H_
#define DDP_PYTHON_SRC_WORK_H_

#include <ATen/core/ivalue.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "absl/status/status.h"
#include "ddp/process_group.h"
#include "task_queue.h"

namespace ddp_torch {

// Throws c10::DistBackendError, which names the rank, the operation and the remedy, unless `status` is OK.
void ThrowIfFailed(const absl::Status& status, int rank, const char* operation);

// Throws c10::DistBackendError: an operation has not ended in the time that its wait() was given.
[[noreturn]] void ThrowTimedOut(int rank, const char* operation, std::chrono::milliseconds timeout);

class QueuedWork;
using Queue = TaskQueue<c10::intrusive_ptr<QueuedWork>>;

// What an operation does.
struct Task {
  // One call of libddp: it is issued in the calling thread and finishes later. Or null, and `run` is all of it.
  std::function<ddp::Work()> start = {};
  // What remains to be done after `start`'s Work, or a sequence of calls, each of which it waits for.
  std::function<void()> run = {};
  // What libddp reads and writes, which must live until the end.
  std::vector<at::Tensor> memory = {};
};

// What an operation is called, and by whom.
struct Title {
  int rank;
  c10d::OpType type;
  const char* name;  // as PyTorch's profiler shows it: "ddp:all_reduce"
  uint64_t sequence;
  std::chrono::milliseconds timeout;
};

// A collective operation.
class CollectiveWork : public c10d::Work {
 public:
  CollectiveWork(const Title& title, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                 std::vector<c10::Device> gpus);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return title_.sequence; }
  // An override where PyTorch is newer than 2.11.
  std::chrono::milliseconds getTimeout() const { return title_.timeout; }

 protected:
  const Title title_;
  std::vector<at::Tensor> inputs_, outputs_;  // kept alive
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  ddp::Work pending_;
};

// An operation on CPU tensors.
class QueuedWork : public CollectiveWork {
 public:
  QueuedWork(std::shared_ptr<Queue> queue, const Title& title, std::vector<at::Tensor> inputs,
             std::vector<at::Tensor> outputs, Task task);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

 private:
  friend Queue;
  bool HasCall() const { return task_.start != nullptr; }
  void Issue();
  void Execute();  // to its end, and remembers the error
  void Complete();

  std::shared_ptr<Queue> queue_;
  Task task_;
  bool issued_ = false;
  bool executed_ = false;  // guarded by the queue's mutex
  std::exception_ptr error_;
};

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_WORK_H_
