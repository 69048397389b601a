// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cuda_optimizer.h"

#include <vector>

#include "examples/nn/check.h"
#include "examples/nn/cuda_kernels.h"
#include "examples/nn/cuda_memory.h"

namespace nn::cuda {
namespace {

// Counts the steps on the GPU, which alone knows which were skipped.
class GpuOptimizer : public Optimizer {
 public:
  GpuOptimizer(size_t count, cudaStream_t stream)
      : count_(count), stream_(stream), state_(AllocateBytes<OptimizerState>(sizeof(OptimizerState), stream)) {}

  int64_t steps() final {
    double steps = 0;
    Check(cudaMemcpyAsync(&steps, &state_->steps, sizeof steps, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return static_cast<int64_t>(steps);
  }
  void set_steps(int64_t steps) final {
    const auto count = static_cast<double>(steps);
    Check(cudaMemcpyAsync(&state_->steps, &count, sizeof count, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 protected:
  void SendRates(double lr, float keep) {
    Check(SetRates({.lr = lr, .sgd_lr = static_cast<float>(lr), .keep = keep}, state_.get(), stream_), "a kernel");
  }

  // What a step on these gradients finds; submits what computes it.
  StepWords WordsFor(absl::Span<const float> grad) {
    if (clip_norm_ == 0) return words_;
    Check(Clip(clip_norm_, grad_scale_, count_, grad.data(), state_.get(), words_, stream_), "a kernel");
    StepWords words = words_;
    words.clip = &state_->clip;
    return words;
  }

  const size_t count_;
  const cudaStream_t stream_;
  const std::shared_ptr<OptimizerState> state_;
};

class GpuSgd final : public GpuOptimizer {
 public:
  GpuSgd(size_t count, const SgdOptions& options, cudaStream_t stream)
      : GpuOptimizer(count, stream),
        options_(options),
        momentum_(options.momentum == 0 ? nullptr : AllocateFloats(count, stream)) {
    SendRates(options.lr, 1);
  }

  void Step(absl::Span<float> value, absl::Span<const float> grad) override {
    NN_CHECK(value.size() == count_ && grad.size() == count_);
    const SgdCoefficients coefficients{.lr = 0,  // the GPU's own
                                       .momentum = static_cast<float>(options_.momentum),
                                       .weight_decay = static_cast<float>(options_.weight_decay),
                                       .grad_scale = grad_scale_};
    Check(Sgd(coefficients, count_, grad.data(), value.data(), momentum_.get(), state_.get(), WordsFor(grad), stream_),
          "a kernel");
  }
  std::vector<NamedState> state() override {
    if (momentum_ == nullptr) return {};
    return {{"momentum", {momentum_.get(), count_}}};
  }
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override {
    if (lr == options_.lr) return;
    options_.lr = lr;
    SendRates(lr, 1);
  }

 private:
  SgdOptions options_;
  std::shared_ptr<float> momentum_;  // null without
};

class GpuAdam final : public GpuOptimizer {
 public:
  GpuAdam(size_t count, const AdamOptions& options, cudaStream_t stream)
      : GpuOptimizer(count, stream),
        options_(options),
        mean_(AllocateFloats(count, stream)),
        square_(AllocateFloats(count, stream)) {
    SendRates(options_.lr, ConstantCoefficients(options_, 1).keep);
  }

  void Step(absl::Span<float> value, absl::Span<const float> grad) override {
    NN_CHECK(value.size() == count_ && grad.size() == count_);
    // The others depend on the number of the step, which is counted on the GPU, and on the rate, which is set there.
    const AdamCoefficients coefficients = ConstantCoefficients(options_, grad_scale_);
    Check(Adam({options_.beta1, options_.beta2}, coefficients, count_, grad.data(), value.data(), mean_.get(),
               square_.get(), state_.get(), WordsFor(grad), stream_),
          "a kernel");
  }
  std::vector<NamedState> state() override {
    return {{"exp_avg", {mean_.get(), count_}}, {"exp_avg_sq", {square_.get(), count_}}};
  }
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override {
    if (lr == options_.lr) return;
    options_.lr = lr;
    SendRates(lr, ConstantCoefficients(options_, 1).keep);
  }

 private:
  AdamOptions options_;
  std::shared_ptr<float> mean_, square_;
};

}  // namespace

std::unique_ptr<Optimizer> MakeSgd(size_t count, const SgdOptions& options, cudaStream_t stream) {
  return std::make_unique<GpuSgd>(count, options, stream);
}

std::unique_ptr<Optimizer> MakeAdam(size_t count, const AdamOptions& options, cudaStream_t stream) {
  return std::make_unique<GpuAdam>(count, options, stream);
}

}  // namespace nn::cuda
