// An operation of the backend, and the queue in which a group's collective operations run.
#ifndef DDP_PYTHON_SRC_WORK_H_
#define DDP_PYTHON_SRC_WORK_H_

#include <ATen/core/ivalue.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "absl/status/status.h"
#include "ddp/process_group.h"

namespace ddp_torch {

// Throws c10::DistBackendError, which names the rank, the operation and the remedy, unless `status` is OK.
void ThrowIfFailed(const absl::Status& status, int rank, const char* operation);

class Queue;

struct Task {
  // One call of libddp: it is issued in the calling thread and finishes later. Or null, and `run` is all of it.
  std::function<ddp::Work()> start = {};
  // What remains to be done after `start`'s Work, or a sequence of calls, each of which it waits for.
  std::function<void()> run = {};
};

class QueuedWork : public c10d::Work {
 public:
  QueuedWork(std::shared_ptr<Queue> queue, int rank, c10d::OpType type, const char* title, uint64_t sequence,
             std::chrono::milliseconds timeout, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
             Task task);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  std::chrono::milliseconds getTimeout() const override { return timeout_; }

 private:
  friend class Queue;
  void Issue();
  void Execute();  // to its end, and remembers the error
  void Complete();

  std::shared_ptr<Queue> queue_;
  const char* title_;
  uint64_t sequence_;
  std::chrono::milliseconds timeout_;
  std::vector<at::Tensor> inputs_, outputs_;  // kept alive
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  Task task_;
  ddp::Work pending_;
  bool issued_ = false;
  std::exception_ptr error_;
};

// Runs the tasks of one group in the order of Submit: in a thread of its own, or in one that waits for a later task.
// Calls of libddp happen in this order too.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  Queue();
  // Finishes all tasks.
  void Stop();
  ~Queue() { Stop(); }

  // `now`: the caller waits, so it is executed at once.
  void Submit(const c10::intrusive_ptr<QueuedWork>& work, bool now);

  // Executes tasks until this one is done.
  void Help(const QueuedWork& work);

 private:
  bool RunFirst();
  void Loop();

  std::mutex mutex_;    // guards the members below
  std::mutex running_;  // held by who executes the first task
  std::condition_variable filled_;
  std::deque<c10::intrusive_ptr<QueuedWork>> tasks_;
  int not_issued_ = 0;  // tasks that still have to call libddp
  bool stop_ = false;
  const int process_;
  std::thread thread_;
};

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_WORK_H_
