// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/nn/cuda_image_layers.h"
#include "examples/nn/cuda_kernels.h"
#include "examples/nn/cuda_linear.h"
#include "examples/nn/cuda_matmul.h"
#include "examples/nn/cuda_memory.h"
#include "examples/nn/cuda_optimizer.h"
#include "examples/nn/device.h"
#include "examples/nn/product_rate.h"

namespace nn {
namespace {

using cuda::Check;

// Its kernels keep the priority of the stream that they were captured on: the library's reductions come first.
class CudaGraph final : public Graph {
 public:
  CudaGraph(cudaGraph_t graph, cudaStream_t stream) : stream_(stream) {
    Check(cudaGraphInstantiate(&executable_, graph, cudaGraphInstantiateFlagUseNodePriority), "cudaGraphInstantiate");
  }
  ~CudaGraph() override { cudaGraphExecDestroy(executable_); }
  void Launch() override { Check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch"); }

 private:
  const cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

class CudaTimer final : public Timer {
 public:
  explicit CudaTimer(cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t& moment : moments_) Check(cudaEventCreate(&moment), "cudaEventCreate");
  }
  ~CudaTimer() override {
    for (cudaEvent_t moment : moments_) cudaEventDestroy(moment);
  }
  void Mark(int64_t n) override { Check(cudaEventRecord(moments_[n % kMarks], stream_), "cudaEventRecord"); }
  int64_t NsToMark(int64_t n) override {
    float ms = 0;
    Check(cudaEventSynchronize(moments_[n % kMarks]), "cudaEventSynchronize");
    Check(cudaEventElapsedTime(&ms, moments_[(n - 1) % kMarks], moments_[n % kMarks]), "cudaEventElapsedTime");
    return static_cast<int64_t>(1e6 * static_cast<double>(ms));
  }

 private:
  const cudaStream_t stream_;
  cudaEvent_t moments_[kMarks] = {};
};

class CudaDevice final : public Device {
 public:
  CudaDevice(cudaStream_t stream, const CudaOptions& options)
      : stream_(stream), options_(options), context_(stream, options.activations, options.tf32) {
    for (cudaEvent_t* const event : {arrived_, arrived_ + 1, released_, released_ + 1}) {
      Check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
    }
    Check(cudaStreamCreateWithFlags(&uploads_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CudaDevice() override {
    cudaStreamSynchronize(uploads_);
    cudaStreamSynchronize(stream_);
    convolutions_.reset();
    for (int slot = 0; slot < kSlots; ++slot) {
      cudaEventDestroy(arrived_[slot]);
      cudaEventDestroy(released_[slot]);
    }
    cudaStreamDestroy(uploads_);
    cudaStreamDestroy(stream_);
  }

  std::string name() const override { return "cuda"; }
  void* stream() const override { return stream_; }

  std::shared_ptr<float> Allocate(size_t count) override { return cuda::AllocateFloats(count, stream_); }
  std::shared_ptr<void> AllocateHost(size_t bytes) override {
    void* data = nullptr;
    Check(cudaHostAlloc(&data, bytes, cudaHostAllocDefault), absl::StrCat("cudaHostAlloc of ", bytes).c_str());
    std::memset(data, 0, bytes);
    return std::shared_ptr<void>(data, [](void* p) { cudaFreeHost(p); });
  }
  void Upload(const void* from, void* to, size_t bytes) override {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  }
  void Download(const void* from, void* to, size_t bytes) override {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    Wait();
  }
  void Wait() override { Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  void UploadTo(int slot, const void* from, void* to, size_t bytes) override {
    Check(cudaStreamWaitEvent(uploads_, released_[slot], 0), "cudaStreamWaitEvent");
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, uploads_), "cudaMemcpyAsync");
    Check(cudaEventRecord(arrived_[slot], uploads_), "cudaEventRecord");
    Check(cudaStreamWaitEvent(stream_, arrived_[slot], 0), "cudaStreamWaitEvent");
  }
  void Release(int slot) override { Check(cudaEventRecord(released_[slot], stream_), "cudaEventRecord"); }
  void Await(int slot) override { Check(cudaEventSynchronize(arrived_[slot]), "cudaEventSynchronize"); }

  std::unique_ptr<Timer> MakeTimer() override { return std::make_unique<CudaTimer>(stream_); }

  // Other threads of the process may go on with whatever they do.
  std::unique_ptr<Graph> Capture(absl::FunctionRef<bool()> submit) override {
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      const bool complete = submit();
      const cudaError_t error = cudaStreamEndCapture(stream_, &graph);
      if (complete) Check(error, "cudaStreamEndCapture");
      std::unique_ptr<Graph> executable = complete ? std::make_unique<CudaGraph>(graph, stream_) : nullptr;
      cudaGetLastError();
      if (graph != nullptr) cudaGraphDestroy(graph);
      return executable;
    } catch (...) {
      if (graph == nullptr) cudaStreamEndCapture(stream_, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
  }

  std::unique_ptr<Layer> MakeLinear(int inputs, int outputs, Activation activation, int max_batch,
                                    Layer* below) override {
    return std::make_unique<cuda::GpuLinear>(context_, inputs, outputs, activation, max_batch, below);
  }
  std::unique_ptr<ImageLayers> MakeImageLayers(int max_batch) override {
    if (convolutions_ == nullptr) {
      convolutions_ = std::make_unique<cudnn::Context>(
          stream_,
          cudnn::Context::Options{options_.activations, options_.tf32, options_.deterministic, options_.plan_file});
    }
    int device = 0, processors = 0;
    if (!options_.shared) {
      Check(cudaGetDevice(&device), "cudaGetDevice");
      Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    }
    return cuda::MakeImageLayers(*convolutions_, processors, max_batch);
  }
  std::unique_ptr<Optimizer> MakeSgd(size_t count, const SgdOptions& options) override {
    return cuda::MakeSgd(count, options, stream_);
  }
  std::unique_ptr<Optimizer> MakeAdam(size_t count, const AdamOptions& options) override {
    return cuda::MakeAdam(count, options, stream_);
  }

  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const LossOptions& options, const LossRing& loss) override {
    Check(cuda::CrossEntropy(options_.activations, logits, labels, rows, classes, options, dlogits, loss, stream_),
          "a kernel");
  }
  void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) override {
    Check(cuda::CountHits(options_.activations, logits, labels, rows, classes, hits, stream_), "a kernel");
  }
  double ProductRate(bool) override {
    constexpr int kSize = 4096;
    constexpr size_t kBytes = size_t{4} * kSize * kSize;  // enough for every type
    std::shared_ptr<void> a, b, c;
    try {
      for (std::shared_ptr<void>* matrix : {&a, &b, &c}) *matrix = cuda::AllocateBytes(kBytes, stream_);
    } catch (const DeviceError&) {  // the model needs it all
      return 0;
    }
    // Numbers of a few sizes: a GPU multiplies zeros with less power, and so faster.
    const bool wide = options_.activations == Element::kFloat32;
    std::vector<uint32_t> words(kBytes / 4);
    for (uint32_t i = 0; i < words.size(); ++i) {
      const uint32_t noise = i * 2654435761u;
      words[i] = wide ? 0x3f800000u | noise >> 9 : 0x3c003c00u | (noise & 0x03ff03ffu);
    }
    Upload(words.data(), a.get(), kBytes);
    Upload(words.data(), b.get(), kBytes);
    cuda::Matmul product(context_, {kSize, kSize}, {kSize, kSize}, options_.activations, CUBLASLT_EPILOGUE_DEFAULT);
    if (!product.supported()) return 0;
    Wait();
    return BestRate(kSize, [&] {
      product.Run(a.get(), b.get(), c.get(), nullptr, nullptr);
      Wait();
    });
  }
  void AddScaled(const float* x, float* y, size_t count, float scale, void* stream) override {
    Check(cuda::AddScaled(x, y, count, scale, static_cast<cudaStream_t>(stream)), "a kernel");
  }

 private:
  cudaStream_t stream_;
  const CudaOptions options_;
  cuda::MatmulContext context_;
  std::unique_ptr<cudnn::Context> convolutions_;  // from the first model that has some
  cudaStream_t uploads_ = nullptr;
  cudaEvent_t arrived_[kSlots] = {}, released_[kSlots] = {};
};

}  // namespace

std::unique_ptr<Device> OpenCuda(int index, const CudaOptions& options) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || index >= count) {
    cudaGetLastError();
    throw DeviceError(absl::StrCat(
        "--device=cuda: GPU ", index, " is asked for, but this process sees ",
        error == cudaSuccess ? absl::StrCat(count) : absl::StrCat("none (", cudaGetErrorString(error), ")"),
        "; start no more ranks on a host than it has GPUs, look at nvidia-smi and CUDA_VISIBLE_DEVICES, or leave out "
        "--device"));
  }
  Check(cudaSetDevice(index), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return std::make_unique<CudaDevice>(stream, options);
}

}  // namespace nn
