// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cuda_image_layers.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "examples/nn/cuda_image_parts.h"

namespace nn::cuda {
namespace {

// A layer that learns nothing.
class Unlearned : public Layer {
 public:
  Unlearned(SessionPtr session, size_t inputs, size_t outputs)
      : session_(std::move(session)), inputs_(session_->Floats(inputs)), outputs_(session_->Floats(outputs)) {}

  int input_size() const override { return inputs_; }
  int output_size() const override { return outputs_; }
  absl::Span<const ParameterSpec> parameters() const override { return {}; }
  void Bind(absl::Span<float* const>, absl::Span<float* const>) override {}

 protected:
  const SessionPtr session_;
  const int inputs_, outputs_;
};

class GpuPool2d final : public Unlearned {
 public:
  GpuPool2d(const SessionPtr& session, const Pool2dOptions& o, int max_batch)
      : Unlearned(session, session->Elements(o.in), session->Elements(o.out())),
        shape_{.in = o.in,
               .out = o.out(),
               .height = o.height,
               .width = o.width,
               .step_height = o.stride == 0 ? o.height : o.stride,
               .step_width = o.stride == 0 ? o.width : o.stride,
               .padding = o.padding,
               .kind = o.kind,
               .relu = o.activation == Activation::kRelu} {
    NN_CHECK(shape_.out.height > 0 && shape_.out.width > 0 && 2 * o.padding <= std::min(o.height, o.width));
    if (o.stride == 0 && o.padding == 0) return;
    NN_CHECK(o.kind == PoolKind::kMax && o.height * o.width <= UINT8_MAX);
    which_ = AllocateBytes<uint8_t>(static_cast<size_t>(max_batch) * session->Elements(o.out()), session->stream);
  }

  void Forward(const float* x, float* y, int rows) override {
    Launched(Pool(session_->element, x, rows, shape_, y, which_.get(), session_->stream));
  }
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool, GradReadyFn) override {
    if (dx == nullptr) return;
    Launched(PoolBackward(session_->element, x, y, which_.get(), dy, rows, shape_, dx, session_->stream));
  }

 private:
  const PoolShape shape_;
  std::shared_ptr<uint8_t> which_;  // the pixels that the last Forward chose; null if windows are adjacent
};

class GpuFlatten final : public Unlearned {
 public:
  GpuFlatten(const SessionPtr& session, const ImageShape& shape)
      : Unlearned(session, session->Elements(shape), session->Elements(shape)), shape_(shape) {}

  void Forward(const float* x, float* y, int rows) override {
    Launched(Flatten(session_->element, x, rows, shape_, y, session_->stream));
  }
  void Backward(const float*, const float*, float* dy, float* dx, int rows, bool, GradReadyFn) override {
    if (dx == nullptr) return;
    Launched(Unflatten(session_->element, dy, rows, shape_, dx, session_->stream));
  }

 private:
  const ImageShape shape_;
};

class GpuDropout final : public Unlearned {
 public:
  GpuDropout(const SessionPtr& session, int size, double p, uint64_t seed)
      : Unlearned(session, static_cast<size_t>(size), static_cast<size_t>(size)),
        size_(size),
        p_(p),
        seed_(seed),
        passes_(AllocateBytes<uint64_t>(sizeof(uint64_t), session->stream)) {
    NN_CHECK(size > 0 && p >= 0 && p < 1);
  }

  void SetTraining(bool training) override { training_ = training; }
  void Forward(const float* x, float* y, int rows) override {
    if (training_) {
      Launched(cuda::Count(passes_.get(), session_->stream));
      Apply(x, y, rows);
      return;
    }
    Check(cudaMemcpyAsync(y, x, Count(rows) * SizeOf(session_->element), cudaMemcpyDeviceToDevice, session_->stream),
          "cudaMemcpyAsync");
  }
  void Backward(const float*, const float*, float* dy, float* dx, int rows, bool, GradReadyFn) override {
    if (dx != nullptr) Apply(dy, dx, rows);
  }

 private:
  size_t Count(int rows) const { return static_cast<size_t>(rows) * static_cast<size_t>(size_); }
  void Apply(const float* from, float* to, int rows) const {
    Launched(cuda::Dropout(session_->element, from, Count(rows), p_, seed_, passes_.get(), to, session_->stream));
  }

  const int size_;
  const double p_;
  const uint64_t seed_;
  const std::shared_ptr<uint64_t> passes_;  // counted where a replayed graph counts on
  bool training_ = true;
};

class GpuImageLayers final : public ImageLayers {
 public:
  GpuImageLayers(cudnn::Context& context, int processors, int max_batch)
      : session_(std::make_shared<Session>(context, processors)), max_batch_(max_batch) {}

  std::unique_ptr<Layer> MakeConv2d(const Conv2dOptions& options) override {
    return std::make_unique<GpuConv2d>(session_, options, max_batch_);
  }
  std::unique_ptr<Layer> MakeBatchNorm2d(const ImageShape& shape, Activation activation) override {
    return std::make_unique<GpuBatchNorm2d>(session_, shape, activation);
  }
  std::unique_ptr<Layer> MakeBasicBlock(const BasicBlockOptions& options) override {
    return cuda::MakeBasicBlock(session_, options, max_batch_);
  }
  std::unique_ptr<Layer> MakeBottleneck(const BottleneckOptions& options) override {
    return cuda::MakeBottleneck(session_, options, max_batch_);
  }
  std::unique_ptr<Layer> MakePool2d(const Pool2dOptions& options) override {
    return std::make_unique<GpuPool2d>(session_, options, max_batch_);
  }
  std::unique_ptr<Layer> MakeFlatten(const ImageShape& shape) override {
    return std::make_unique<GpuFlatten>(session_, shape);
  }
  std::unique_ptr<Layer> MakeDropout(int size, double p, uint64_t seed) override {
    return std::make_unique<GpuDropout>(session_, size, p, seed);
  }

 private:
  SessionPtr session_;
  int max_batch_;
};

}  // namespace

std::unique_ptr<ImageLayers> MakeImageLayers(cudnn::Context& context, int processors, int max_batch) {
  return std::make_unique<GpuImageLayers>(context, processors, max_batch);
}

}  // namespace nn::cuda
