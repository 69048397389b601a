// SPDX-License-Identifier: Apache-2.0
// An operation of the backend on CUDA tensors.
#ifndef DDP_PYTHON_SRC_STREAM_WORK_H_
#define DDP_PYTHON_SRC_STREAM_WORK_H_

#include <c10/core/Event.h>

#include <chrono>
#include <mutex>
#include <vector>

#include "work.h"

namespace ddp_torch {

// Starts in the calling thread, after the work of its current stream. wait() makes the then current stream wait and
// returns at once; an error that comes later is that of the group's next operation. The future is complete from the
// start, as PyTorch's futures of GPU work are: who waits for it makes a stream wait.
class StreamWork : public CollectiveWork {
 public:
  // `async`: the calling thread's stream goes on without this operation until wait() is called.
  StreamWork(const at::Device& device, const Title& title, std::vector<at::Tensor> inputs,
             std::vector<at::Tensor> outputs, Task task, bool async);

  bool isCompleted() override;
  // With a time-out, the host waits.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }

 private:
  void Begin(const at::Device& device, const Task& task, bool async);
  void Look(absl::Time deadline);  // whether it has ended, and how

  std::mutex look_mutex_;  // guards `pending_`
  c10::Event end_;
};

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_STREAM_WORK_H_
