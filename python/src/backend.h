// SPDX-License-Identifier: Apache-2.0
// The backend "ddp" of torch.distributed: a c10d::Backend whose operations are those of a ddp::ProcessGroup.
#ifndef DDP_PYTHON_SRC_BACKEND_H_
#define DDP_PYTHON_SRC_BACKEND_H_

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "announcements.h"
#include "ddp/context.h"
#include "work.h"

namespace ddp_torch {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class DdpBackend : public c10d::Backend {
 public:
  // Collective; blocks until all ranks have come.
  DdpBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);
  ~DdpBackend() override;

  const std::string getBackendName() const override { return "ddp"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setSequenceNumberForGroup() override {}  // it starts with 0 on every rank
  void abort() override;

  // Memory that the ranks share, in which DistributedDataParallel then keeps its buckets. Collective: all ranks ask for
  // the same sizes in the same order. Where there is no more to share, it is ordinary memory on all of them.
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return device < 0; }  // on the CPU
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  void shutdown() override { queue_->Stop(); }

  // By the names of PyTorch 2.11, which later versions call where a backend does not have their own.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  // An override where PyTorch is newer than 2.11.
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts);
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all) override;

 private:
  friend class Message;
  struct Operation {
    c10d::OpType type;
    const char* title;  // as PyTorch's profiler shows it: "ddp:all_reduce"
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    bool async = true;
  };

  // The group for tensors of this device. That of a GPU is made by the first operation on it.
  ddp::ProcessGroup& GroupOf(const at::Device& device);
  ddp::ProcessGroup& GroupFor(const at::Device& device, std::chrono::milliseconds timeout);
  std::unique_ptr<ddp::Context> MakeContext(const std::string& prefix, ddp::Device device);

  WorkPtr Submit(const Operation& operation, const at::Device& device, Tensors inputs, Tensors outputs, Task task);
  // An operation that moves elements of any type from the `in` to the `out` tensors by one call.
  using Call = std::function<ddp::Work(ddp::ProcessGroup&, ddp::Buffers in, ddp::Buffers out, ddp::Stream)>;
  WorkPtr Move(const Operation& operation, const Tensors& in, const Tensors& out, Call call);
  // The same with arithmetic.
  using ReduceCall = std::function<ddp::Work(ddp::ProcessGroup&, ddp::Buffers in, ddp::Buffers out,
                                             const ddp::ReduceOptions&, ddp::Stream)>;
  WorkPtr Reduce(const Operation& operation, const c10d::ReduceOp& op, const Tensors& in, const Tensors& out,
                 ReduceCall call);
  WorkPtr ReduceBitwise(const Operation& operation, const c10d::ReduceOp& op, const Tensors& in, const Tensors& out,
                        int64_t first);
  WorkPtr AllReduce(const Operation& operation, const c10d::ReduceOp& op, const Tensors& tensors);
  WorkPtr ReduceScatter(const Operation& operation, const c10d::ReduceOp& op, const Tensors& in, const Tensors& out);
  // Within a Task: they wait. On GPUs they run in the current stream.
  void Run(const char* title, ddp::Work work) { ThrowIfFailed(work.Wait(), rank_, title); }
  at::Tensor GatherAll(const char* title, const at::Tensor& mine, std::chrono::milliseconds timeout);
  at::Tensor SumSparse(const char* title, const at::Tensor& mine, std::chrono::milliseconds timeout);
  // Starts a message.
  WorkPtr Start(Tensors& tensors, int peer, int tag, c10d::OpType type, const char* title);

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  std::unique_ptr<ddp::Context> cpu_;
  std::mutex contexts_mutex_;
  std::map<int, std::unique_ptr<ddp::Context>> gpus_;
  std::unique_ptr<Announcements> announcements_;
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  uint64_t sequence_ = 0;
  int64_t monitored_barriers_ = 0;
};

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_BACKEND_H_
