#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/nn/check.h"
#include "examples/nn/cuda_kernels.h"
#include "examples/nn/cuda_linear.h"
#include "examples/nn/cuda_matmul.h"
#include "examples/nn/device.h"

namespace nn {
namespace {

using cuda::Check;

std::shared_ptr<float> AllocateFloats(size_t count, cudaStream_t stream) {
  void* data = nullptr;
  const size_t bytes = count * sizeof(float);
  Check(cudaMalloc(&data, bytes), absl::StrCat("cudaMalloc of ", bytes, " bytes").c_str());
  std::shared_ptr<float> memory(static_cast<float*>(data), [](float* p) { cudaFree(p); });
  Check(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync");
  return memory;
}

class GpuSgd final : public Optimizer {
 public:
  GpuSgd(size_t count, const SgdOptions& options, cudaStream_t stream)
      : options_(options),
        count_(count),
        stream_(stream),
        momentum_(options.momentum == 0 ? nullptr : AllocateFloats(count, stream)) {}

  void Step(absl::Span<float> value, absl::Span<const float> grad) override {
    NN_CHECK(value.size() == count_ && grad.size() == count_);
    const SgdCoefficients coefficients{.lr = static_cast<float>(options_.lr),
                                       .momentum = static_cast<float>(options_.momentum),
                                       .weight_decay = static_cast<float>(options_.weight_decay),
                                       .grad_scale = grad_scale_};
    Check(cuda::Sgd(coefficients, count_, grad.data(), value.data(), momentum_.get(), skip_, stream_), "a kernel");
    ++steps_;
  }
  std::vector<NamedState> state() override {
    if (momentum_ == nullptr) return {};
    return {{"momentum", {momentum_.get(), count_}}};
  }
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override { options_.lr = lr; }

 private:
  SgdOptions options_;
  size_t count_;
  cudaStream_t stream_;
  std::shared_ptr<float> momentum_;  // null without
};

class GpuAdam final : public Optimizer {
 public:
  GpuAdam(size_t count, const AdamOptions& options, cudaStream_t stream)
      : options_(options),
        count_(count),
        stream_(stream),
        mean_(AllocateFloats(count, stream)),
        square_(AllocateFloats(count, stream)),
        numbers_(AllocateFloats(sizeof(cuda::AdamState) / sizeof(float), stream)) {}

  void Step(absl::Span<float> value, absl::Span<const float> grad) override {
    NN_CHECK(value.size() == count_ && grad.size() == count_);
    // The others depend on the number of the step, which is counted on the GPU.
    const AdamCoefficients coefficients = ConstantCoefficients(options_, grad_scale_);
    Check(cuda::Adam({options_.lr, options_.beta1, options_.beta2}, coefficients, count_, grad.data(), value.data(),
                     mean_.get(), square_.get(), numbers(), skip_, stream_),
          "a kernel");
    ++steps_;
  }
  std::vector<NamedState> state() override {
    return {{"exp_avg", {mean_.get(), count_}}, {"exp_avg_sq", {square_.get(), count_}}};
  }
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override { options_.lr = lr; }
  void set_steps(int64_t steps) override {
    Optimizer::set_steps(steps);
    const double count = static_cast<double>(steps);
    Check(cudaMemcpyAsync(&numbers()->steps, &count, sizeof count, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  cuda::AdamState* numbers() { return reinterpret_cast<cuda::AdamState*>(numbers_.get()); }

  AdamOptions options_;
  size_t count_;
  cudaStream_t stream_;
  std::shared_ptr<float> mean_, square_, numbers_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(cudaStream_t stream, bool tf32) : stream_(stream), context_(stream, tf32) {
    for (cudaEvent_t& mark : marks_) Check(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~CudaDevice() override {
    cudaStreamSynchronize(stream_);
    for (const cudaEvent_t mark : marks_) cudaEventDestroy(mark);
    cudaStreamDestroy(stream_);
  }

  std::string name() const override { return "cuda"; }
  void* stream() const override { return stream_; }

  std::shared_ptr<float> Allocate(size_t count) override { return AllocateFloats(count, stream_); }
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
  void Mark(int mark) override { Check(cudaEventRecord(marks_[mark], stream_), "cudaEventRecord"); }
  void Await(int mark) override { Check(cudaEventSynchronize(marks_[mark]), "cudaEventSynchronize"); }

  std::unique_ptr<Layer> MakeLinear(int inputs, int outputs, Activation activation, int max_batch,
                                    Layer* below) override {
    return std::make_unique<cuda::GpuLinear>(context_, inputs, outputs, activation, max_batch,
                                             dynamic_cast<cuda::GpuLinear*>(below));
  }
  std::unique_ptr<Optimizer> MakeSgd(size_t count, const SgdOptions& options) override {
    return std::make_unique<GpuSgd>(count, options, stream_);
  }
  std::unique_ptr<Optimizer> MakeAdam(size_t count, const AdamOptions& options) override {
    return std::make_unique<GpuAdam>(count, options, stream_);
  }

  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const LossOptions& options, double* loss) override {
    Check(cuda::CrossEntropy(logits, labels, rows, classes, options.label_smoothing, options.grad_scale, dlogits, loss,
                             stream_),
          "a kernel");
  }
  void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) override {
    Check(cuda::CountHits(logits, labels, rows, classes, hits, stream_), "a kernel");
  }

 private:
  cudaStream_t stream_;
  cuda::MatmulContext context_;
  cudaEvent_t marks_[kMarks] = {};
};

}  // namespace

std::unique_ptr<Device> OpenCuda(int index, bool tf32) {
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
  return std::make_unique<CudaDevice>(stream, tf32);
}

}  // namespace nn
