// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "examples/nn/cuda_image_parts.h"
#include "examples/nn/layer_parts.h"

namespace nn::cuda {
namespace {

// A convolution without a bias, and the normalisation of its outputs, on which a ReLU and a shortcut ride.
class GpuConvNorm {
 public:
  GpuConvNorm(const SessionPtr& session, const Conv2dOptions& options, Activation activation, int max_batch)
      : conv(session, options, max_batch),
        bn(session, options.out(), activation),
        between_(session->Allocate(static_cast<size_t>(max_batch) * session->Elements(options.out()))) {}

  void Forward(const float* x, const Shortcut* shortcut, float* y, ReluBits* passed, int rows) {
    bool has_sums = false;
    if (bn.WantsSums(rows)) {
      has_sums =
          conv.Forward(x, between(), rows, bn.sums(), [&](const float* sums) { bn.TryMoments(between(), sums, rows); });
    } else {
      conv.Forward(x, between(), rows);
    }
    bn.Forward(between(), has_sums ? bn.sums() : nullptr, shortcut, y, passed, rows);
  }

  // `d`: memory for the gradient of the convolution's outputs; it may be dy. `added`: see GpuConv2d.
  void Backward(ReluMask mask, const float* x, const ReluBits* passed, float* dy, float* d, const float* added,
                float* dx, int rows, bool accumulate, GradReadyFn norm_ready, GradReadyFn conv_ready) {
    bn.Backward(mask, between(), passed, dy, d, rows, accumulate, norm_ready);
    conv.Backward(x, nullptr, d, added, dx, rows, accumulate, conv_ready);
  }

  GpuConv2d conv;
  GpuBatchNorm2d bn;

 private:
  float* between() const { return static_cast<float*>(between_.get()); }

  const std::shared_ptr<void> between_;
};

class GpuBasicBlock final : public CompositeLayer {
 public:
  GpuBasicBlock(SessionPtr session, const BasicBlockOptions& o, int max_batch)
      : session_(std::move(session)),
        options_(o),
        first_(session_, {.in = o.in, .outputs = o.outputs, .stride = o.stride, .padding = 1, .bias = false},
               Activation::kRelu, max_batch),
        second_(session_, {.in = o.out(), .outputs = o.outputs, .padding = 1, .bias = false}, Activation::kNone,
                max_batch) {
    NN_CHECK(o.outputs >= o.in.channels);
    SetParts({{"conv1", &first_.conv}, {"bn1", &first_.bn}, {"conv2", &second_.conv}, {"bn2", &second_.bn}});
    const size_t elements = static_cast<size_t>(max_batch) * session_->Elements(o.out());
    inner_ = session_->Allocate(elements);
    passed_ = session_->AllocateRelu(elements);
    for (const int which : {kBlockTemporary, kBlockTemporary + 1}) session_->ReserveTemporary(which, elements);
  }

  int input_size() const override { return first_.conv.input_size(); }
  int output_size() const override { return second_.conv.output_size(); }

  void Forward(const float* x, float* y, int rows) override {
    const Shortcut shortcut = ShortcutFrom(x);
    first_.Forward(x, nullptr, inner(), nullptr, rows);
    second_.Forward(inner(), &shortcut, y, passed_.get(), rows);
  }

  void Backward(const float* x, const float*, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override {
    auto* const d1 = static_cast<float*>(session_->Temporary(kBlockTemporary));
    auto* const d2 = static_cast<float*>(session_->Temporary(kBlockTemporary + 1));
    const bool same_shape = options_.in == options_.out();
    second_.Backward(ReluMask::kStore, inner(), passed_.get(), dy, d1, nullptr, d2, rows, accumulate,
                     Ready(3, grad_ready), Ready(2, grad_ready));
    first_.Backward(ReluMask::kOwn, x, nullptr, d2, d1, same_shape ? dy : nullptr, dx, rows, accumulate,
                    Ready(1, grad_ready), Ready(0, grad_ready));
    if (dx == nullptr || same_shape) return;
    Launched(AddToShortcut(session_->element, dy, rows, ShortcutFrom(nullptr), dx, session_->stream));
  }

 private:
  float* inner() const { return static_cast<float*>(inner_.get()); }
  Shortcut ShortcutFrom(const float* x) const { return {x, options_.in, options_.out(), options_.stride}; }

  SessionPtr session_;
  const BasicBlockOptions options_;
  GpuConvNorm first_, second_;
  std::shared_ptr<void> inner_;  // the outputs of the first
  std::shared_ptr<ReluBits> passed_;
};

class GpuBottleneck final : public CompositeLayer {
 public:
  GpuBottleneck(SessionPtr session, const BottleneckOptions& o, int max_batch)
      : session_(std::move(session)),
        in_(o.in),
        out_(o.out()),
        before_{o.width, in_.height, in_.width},
        after_{o.width, out_.height, out_.width},
        first_(session_, {.in = in_, .outputs = o.width, .kernel = 1, .bias = false}, Activation::kRelu, max_batch),
        second_(session_, {.in = before_, .outputs = o.width, .stride = o.stride, .padding = 1, .bias = false},
                Activation::kRelu, max_batch),
        third_(session_, {.in = after_, .outputs = out_.channels, .kernel = 1, .bias = false}, Activation::kNone,
               max_batch) {
    if (o.projected()) {
      const Conv2dOptions projection = {
          .in = in_, .outputs = out_.channels, .kernel = 1, .stride = o.stride, .bias = false};
      projection_ = std::make_unique<GpuConvNorm>(session_, projection, Activation::kNone, max_batch);
    }
    SetParts(BottleneckParts({&first_.conv, &first_.bn, &second_.conv, &second_.bn, &third_.conv, &third_.bn},
                             projection_ == nullptr ? nullptr : &projection_->conv,
                             projection_ == nullptr ? nullptr : &projection_->bn));
    const auto elements = [&](const ImageShape& shape) {
      return static_cast<size_t>(max_batch) * session_->Elements(shape);
    };
    inner_[0] = session_->Allocate(elements(before_));
    inner_[1] = session_->Allocate(elements(after_));
    passed_ = session_->AllocateRelu(elements(out_));
    session_->ReserveTemporary(kBlockTemporary, std::max(elements(out_), elements(before_)));
    session_->ReserveTemporary(kBlockTemporary + 1, elements(after_));
    if (projection_ != nullptr) session_->ReserveTemporary(kShortcutTemporary, elements(in_));
  }

  int input_size() const override { return first_.conv.input_size(); }
  int output_size() const override { return third_.conv.output_size(); }

  void Forward(const float* x, float* y, int rows) override {
    first_.Forward(x, nullptr, inner(0), nullptr, rows);
    second_.Forward(inner(0), nullptr, inner(1), nullptr, rows);
    Shortcut shortcut = {x, in_, out_, 1};
    if (projection_ != nullptr) {
      float* const projected = Temporary(kBlockTemporary);
      projection_->Forward(x, nullptr, projected, nullptr, rows);
      shortcut = {projected, out_, out_, 1};
    }
    third_.Forward(inner(1), &shortcut, y, passed_.get(), rows);
  }

  // The shortcut first, so that gradients are announced in the reverse order of the parameters.
  void Backward(const float* x, const float*, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override {
    float* const a = Temporary(kBlockTemporary);
    float* const b = Temporary(kBlockTemporary + 1);
    const float* of_shortcut = dy;  // the gradient of x by way of it
    ReluMask mask = ReluMask::kStore;
    if (projection_ != nullptr) {
      float* const projected = dx == nullptr ? nullptr : Temporary(kShortcutTemporary);
      projection_->Backward(mask, x, passed_.get(), dy, a, nullptr, projected, rows, accumulate, Ready(7, grad_ready),
                            Ready(6, grad_ready));
      of_shortcut = projected;
      mask = ReluMask::kNone;  // dy is masked now
    }
    third_.Backward(mask, inner(1), passed_.get(), dy, a, nullptr, b, rows, accumulate, Ready(5, grad_ready),
                    Ready(4, grad_ready));
    second_.Backward(ReluMask::kOwn, inner(0), nullptr, b, b, nullptr, a, rows, accumulate, Ready(3, grad_ready),
                     Ready(2, grad_ready));
    first_.Backward(ReluMask::kOwn, x, nullptr, a, a, of_shortcut, dx, rows, accumulate, Ready(1, grad_ready),
                    Ready(0, grad_ready));
  }

 private:
  float* inner(int i) const { return static_cast<float*>(inner_[i].get()); }
  float* Temporary(int which) const { return static_cast<float*>(session_->Temporary(which)); }

  SessionPtr session_;
  const ImageShape in_, out_, before_, after_;  // before and after the 3x3 convolution
  GpuConvNorm first_, second_, third_;
  std::unique_ptr<GpuConvNorm> projection_;  // null: the shortcut is x
  std::shared_ptr<void> inner_[2];           // the outputs of the first and the second
  std::shared_ptr<ReluBits> passed_;
};

}  // namespace

std::unique_ptr<Layer> MakeBasicBlock(const SessionPtr& session, const BasicBlockOptions& options, int max_batch) {
  return std::make_unique<GpuBasicBlock>(session, options, max_batch);
}

std::unique_ptr<Layer> MakeBottleneck(const SessionPtr& session, const BottleneckOptions& options, int max_batch) {
  return std::make_unique<GpuBottleneck>(session, options, max_batch);
}

}  // namespace nn::cuda
