// SPDX-License-Identifier: Apache-2.0
// Ranks of GpuBackend(), each with a real GPU, and memory and streams of theirs.
#ifndef TESTS_GPU_ON_GPUS_H_
#define TESTS_GPU_ON_GPUS_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/context.h"
#include "tests/support/check.h"
#include "tests/support/gpu.h"
#include "tests/support/numbers.h"
#include "tests/support/ranks.h"

#define GPU(call) RANK_CHECK_EQ(std::string(cudaGetErrorName(call)), "cudaSuccess")

namespace ddp::testing {

inline ContextOptions OnGpus() {
  ContextOptions options;
  options.backend = GpuBackend();
  // On a machine with one GPU the ranks share it: over NCCL from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1.
  options.device = {Device::Kind::kCuda, -1};
  return options;
}

inline void RunOnGpus(const std::function<void(Rank&)>& body, const ContextOptions& options = OnGpus()) {
  RunOnRanks(
      [&](Rank& rank) {
        GPU(cudaSetDevice(rank.context().device().index));
        body(rank);
      },
      options);
}

// A stream of the caller's.
class CallerStream {
 public:
  explicit CallerStream(Rank& rank) : device_(rank.context().device()) {
    GPU(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~CallerStream() { cudaStreamDestroy(stream_); }
  CallerStream(const CallerStream&) = delete;
  CallerStream& operator=(const CallerStream&) = delete;
  Stream get() const { return {device_, stream_}; }
  cudaStream_t native() const { return stream_; }
  void Wait() const { GPU(cudaStreamSynchronize(stream_)); }

 private:
  Device device_;
  cudaStream_t stream_ = nullptr;
};

// What `submit` submits to a stream, as a graph. No thread of the process may do what a capture forbids, except where
// other ranks are threads of it.
class CapturedGraph {
 public:
  CapturedGraph(const CallerStream& stream, const std::function<void()>& submit) {
    GPU(cudaStreamBeginCapture(stream.native(),
                               RanksAreThreads() ? cudaStreamCaptureModeThreadLocal : cudaStreamCaptureModeGlobal));
    submit();
    GPU(cudaStreamEndCapture(stream.native(), &graph_));
    GPU(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~CapturedGraph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  void Launch(const CallerStream& stream) const { GPU(cudaGraphLaunch(executable_, stream.native())); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Device memory that is written and read element by element on the host.
class Array {
 public:
  Array(Rank& rank, DType dtype, size_t count, bool allocated)
      : dtype_(dtype),
        count_(count),
        device_(rank.context().device()),
        host_(std::max<size_t>(1, count * SizeOf(dtype))) {
    if (allocated) {
      allocation_ = RANK_VALUE(rank.group().Allocate(host_.size(), device_));
      data_ = static_cast<char*>(allocation_.data());
    } else {
      GPU(cudaMalloc(reinterpret_cast<void**>(&data_), host_.size()));
      own_.reset(data_, [](char* p) { cudaFree(p); });
    }
  }
  template <typename Fn>
  void Fill(Fn value) {
    for (size_t i = 0; i < count_; ++i) SetElement(dtype_, host_.data(), i, value(i));
    GPU(cudaMemcpy(data_, host_.data(), host_.size(), cudaMemcpyHostToDevice));
    GPU(cudaStreamSynchronize(cudaStreamLegacy));  // from pageable memory it may return before the data has arrived
  }
  template <typename Fn>
  void Expect(Fn value, double tolerance = 0) {
    GPU(cudaMemcpy(host_.data(), data_, host_.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count_; ++i) {
      const double expected = value(i), got = GetElement(dtype_, host_.data(), i);
      RANK_CHECK(std::fabs(got - expected) <= tolerance * std::fabs(expected), "element ", i, " of ", count_, " is ",
                 got, ", not ", expected);
    }
  }
  std::vector<Buffer> Cut(size_t pieces) const { return testing::Cut({data_, count_, dtype_, device_}, pieces); }
  char* data() const { return data_; }

 private:
  DType dtype_;
  size_t count_;
  Device device_;
  std::vector<char> host_;
  Allocation allocation_;
  std::shared_ptr<char> own_;
  char* data_ = nullptr;
};

}  // namespace ddp::testing

#endif  // TESTS_GPU_ON_GPUS_H_
