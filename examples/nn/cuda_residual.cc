// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "examples/nn/cuda_image_parts.h"
#include "examples/nn/layer_parts.h"

namespace nn::cuda {
namespace {

// The ReLUs and the shortcut ride on the normalisations.
class GpuBasicBlock final : public CompositeLayer {
 public:
  GpuBasicBlock(SessionPtr session, const BasicBlockOptions& o, int max_batch)
      : session_(std::move(session)),
        options_(o),
        conv1_(session_, {.in = o.in, .outputs = o.outputs, .stride = o.stride, .padding = 1, .bias = false},
               max_batch),
        bn1_(session_, o.out(), Activation::kRelu),
        conv2_(session_, {.in = o.out(), .outputs = o.outputs, .padding = 1, .bias = false}, max_batch),
        bn2_(session_, o.out(), Activation::kNone) {
    NN_CHECK(o.outputs >= o.in.channels);
    SetParts({{"conv1", &conv1_}, {"bn1", &bn1_}, {"conv2", &conv2_}, {"bn2", &bn2_}});
    const size_t elements = static_cast<size_t>(max_batch) * session_->Elements(o.out());
    for (std::shared_ptr<void>& output : outputs_) output = session_->Allocate(elements);
    for (const int which : {kBlockTemporary, kBlockTemporary + 1}) session_->ReserveTemporary(which, elements);
  }

  int input_size() const override { return conv1_.input_size(); }
  int output_size() const override { return conv1_.output_size(); }

  void Forward(const float* x, float* y, int rows) override {
    conv1_.Forward(x, output(0), rows);
    bn1_.Forward(output(0), output(1), rows);
    conv2_.Forward(output(1), output(2), rows);
    const Shortcut shortcut = ShortcutFrom(x);
    bn2_.Forward(output(2), &shortcut, true, y, rows);
  }

  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override {
    auto* const d1 = static_cast<float*>(session_->Temporary(kBlockTemporary));
    auto* const d2 = static_cast<float*>(session_->Temporary(kBlockTemporary + 1));
    bn2_.Backward(ReluMask::kStore, output(2), y, dy, d1, rows, accumulate, Ready(3, grad_ready));
    conv2_.Backward(output(1), nullptr, d1, d2, rows, accumulate, Ready(2, grad_ready));
    bn1_.Backward(output(0), output(1), d2, d1, rows, accumulate, Ready(1, grad_ready));
    conv1_.Backward(x, nullptr, d1, dx, rows, accumulate, Ready(0, grad_ready));
    if (dx == nullptr) return;
    Launched(AddToShortcut(session_->element, dy, rows, ShortcutFrom(nullptr), dx, session_->stream));
  }

 private:
  float* output(int i) const { return static_cast<float*>(outputs_[i].get()); }
  Shortcut ShortcutFrom(const float* x) const { return {x, options_.in, options_.out(), options_.stride}; }

  SessionPtr session_;
  const BasicBlockOptions options_;
  GpuConv2d conv1_;
  GpuBatchNorm2d bn1_;
  GpuConv2d conv2_;
  GpuBatchNorm2d bn2_;
  std::shared_ptr<void> outputs_[3];  // of all but bn2
};

// The ReLUs and the shortcut ride on the normalisations of the body.
class GpuBottleneck final : public CompositeLayer {
 public:
  GpuBottleneck(SessionPtr session, const BottleneckOptions& o, int max_batch)
      : session_(std::move(session)),
        in_(o.in),
        out_(o.out()),
        before_{o.width, in_.height, in_.width},
        after_{o.width, out_.height, out_.width},
        conv1_(session_, {.in = in_, .outputs = o.width, .kernel = 1, .bias = false}, max_batch),
        bn1_(session_, before_, Activation::kRelu),
        conv2_(session_, {.in = before_, .outputs = o.width, .stride = o.stride, .padding = 1, .bias = false},
               max_batch),
        bn2_(session_, after_, Activation::kRelu),
        conv3_(session_, {.in = after_, .outputs = out_.channels, .kernel = 1, .bias = false}, max_batch),
        bn3_(session_, out_, Activation::kNone),
        projection_(o.projected() ? new Projection(session_, o, max_batch) : nullptr) {
    SetParts(BottleneckParts({&conv1_, &bn1_, &conv2_, &bn2_, &conv3_, &bn3_},
                             projection_ == nullptr ? nullptr : &projection_->conv,
                             projection_ == nullptr ? nullptr : &projection_->bn));
    const auto elements = [&](const ImageShape& shape) {
      return static_cast<size_t>(max_batch) * session_->Elements(shape);
    };
    const ImageShape* const shapes[] = {&before_, &before_, &after_, &after_, &out_};
    for (size_t i = 0; i < std::size(shapes); ++i) outputs_[i] = session_->Allocate(elements(*shapes[i]));
    session_->ReserveTemporary(kBlockTemporary, std::max(elements(out_), elements(before_)));
    session_->ReserveTemporary(kBlockTemporary + 1, std::max(elements(after_), elements(in_)));
  }

  int input_size() const override { return conv1_.input_size(); }
  int output_size() const override { return conv3_.output_size(); }

  void Forward(const float* x, float* y, int rows) override {
    conv1_.Forward(x, output(0), rows);
    bn1_.Forward(output(0), output(1), rows);
    conv2_.Forward(output(1), output(2), rows);
    bn2_.Forward(output(2), output(3), rows);
    conv3_.Forward(output(3), output(4), rows);
    Shortcut shortcut = {x, in_, out_, 1};
    if (projection_ != nullptr) {
      auto* const projected = static_cast<float*>(session_->Temporary(kBlockTemporary));
      projection_->conv.Forward(x, projection_->Output(), rows);
      projection_->bn.Forward(projection_->Output(), projected, rows);
      shortcut = {projected, out_, out_, 1};
    }
    bn3_.Forward(output(4), &shortcut, true, y, rows);
  }

  // The shortcut first, so that gradients are announced in the reverse order of the parameters.
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override {
    auto* const a = static_cast<float*>(session_->Temporary(kBlockTemporary));
    auto* const b = static_cast<float*>(session_->Temporary(kBlockTemporary + 1));
    if (projection_ != nullptr) {
      projection_->bn.Backward(ReluMask::kStore, projection_->Output(), y, dy, a, rows, accumulate,
                               Ready(7, grad_ready));
      projection_->conv.Backward(x, nullptr, a, dx, rows, accumulate, Ready(6, grad_ready));
    }
    bn3_.Backward(projection_ != nullptr ? ReluMask::kNone : ReluMask::kStore, output(4), y, dy, a, rows, accumulate,
                  Ready(5, grad_ready));
    conv3_.Backward(output(3), nullptr, a, b, rows, accumulate, Ready(4, grad_ready));
    bn2_.Backward(output(2), output(3), b, b, rows, accumulate, Ready(3, grad_ready));
    conv2_.Backward(output(1), nullptr, b, a, rows, accumulate, Ready(2, grad_ready));
    bn1_.Backward(output(0), output(1), a, a, rows, accumulate, Ready(1, grad_ready));
    float* const of_body = projection_ == nullptr || dx == nullptr ? dx : b;
    conv1_.Backward(x, nullptr, a, of_body, rows, accumulate, Ready(0, grad_ready));
    if (dx == nullptr) return;
    if (projection_ != nullptr) {
      Launched(Add(session_->element, b, static_cast<size_t>(rows) * session_->Elements(in_), dx, session_->stream));
    } else {
      Launched(AddToShortcut(session_->element, dy, rows, {nullptr, in_, out_, 1}, dx, session_->stream));
    }
  }

 private:
  struct Projection {
    Projection(const SessionPtr& session, const BottleneckOptions& o, int max_batch)
        : conv(session, {.in = o.in, .outputs = o.out().channels, .kernel = 1, .stride = o.stride, .bias = false},
               max_batch),
          bn(session, o.out(), Activation::kNone),
          output(session->Allocate(static_cast<size_t>(max_batch) * session->Elements(o.out()))) {}
    float* Output() const { return static_cast<float*>(output.get()); }

    GpuConv2d conv;
    GpuBatchNorm2d bn;
    std::shared_ptr<void> output;  // of conv
  };
  float* output(int i) const { return static_cast<float*>(outputs_[i].get()); }

  SessionPtr session_;
  const ImageShape in_, out_, before_, after_;  // before and after the 3x3 convolution
  GpuConv2d conv1_;
  GpuBatchNorm2d bn1_;
  GpuConv2d conv2_;
  GpuBatchNorm2d bn2_;
  GpuConv2d conv3_;
  GpuBatchNorm2d bn3_;
  std::unique_ptr<Projection> projection_;  // null: the shortcut is x
  std::shared_ptr<void> outputs_[5];        // of all layers of the body but bn3
};

}  // namespace

std::unique_ptr<Layer> MakeBasicBlock(const SessionPtr& session, const BasicBlockOptions& options, int max_batch) {
  return std::make_unique<GpuBasicBlock>(session, options, max_batch);
}

std::unique_ptr<Layer> MakeBottleneck(const SessionPtr& session, const BottleneckOptions& options, int max_batch) {
  return std::make_unique<GpuBottleneck>(session, options, max_batch);
}

}  // namespace nn::cuda
