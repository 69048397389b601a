// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/conv2d.h"

#include <cstddef>
#include <utility>

#include "ddp/autocast.h"
#include "examples/nn/check.h"
#include "examples/nn/kernels.h"

namespace nn {

Conv2d::Conv2d(onednn::SessionPtr session, const Conv2dOptions& o, int max_batch)
    : WeightedLayer({o.outputs, o.in.channels, o.kernel, o.kernel}, int64_t{o.in.channels} * o.kernel * o.kernel,
                    o.bias, static_cast<int64_t>(Pixels(1, o.out()))),
      session_(std::move(session)),
      shape_{o.in, o.outputs, o.kernel, o.stride, o.padding, o.in_layout},
      activation_(o.activation),
      max_batch_(max_batch) {
  NN_CHECK(o.outputs > 0 && o.kernel > 0 && o.stride > 0 && o.padding >= 0 && max_batch > 0);
  NN_CHECK(o.in.channels > 0 && shape_.out().height > 0 && shape_.out().width > 0);
}

int Conv2d::input_size() const { return static_cast<int>(session_->Floats(shape_.in, shape_.in_layout)); }

int Conv2d::output_size() const { return static_cast<int>(session_->Floats(shape_.out(), Layout::kNative)); }

onednn::Convolution& Conv2d::ConvolutionFor(int rows, bool bfloat16) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  return (bfloat16 ? bfloat16_convolutions_ : convolutions_).Get(rows, [&] {
    const onednn::ConvolutionOptions options = {.bias = has_bias(), .bfloat16 = bfloat16};
    return std::make_unique<onednn::Convolution>(session_, shape_, rows, options);
  });
}

void Conv2d::Forward(const float* x, float* y, int rows) {
  NN_CHECK(weight_ != nullptr);
  bfloat16_ = ddp::Autocast::TypeFor(ddp::AutocastOp::kConvolution, ddp::Device::Kind::kCpu, {ddp::DType::kFloat32}) ==
              ddp::DType::kBFloat16;
  ConvolutionFor(rows, bfloat16_).Forward(x, weight_, bias_, y);
  if (activation_ == Activation::kRelu) Relu(y, static_cast<size_t>(rows) * static_cast<size_t>(output_size()));
}

void Conv2d::Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                      GradReadyFn grad_ready) {
  if (activation_ == Activation::kRelu) {
    MaskPositive(y, dy, static_cast<size_t>(rows) * static_cast<size_t>(output_size()));
  }
  onednn::Convolution& convolution = ConvolutionFor(rows, bfloat16_);
  convolution.BackwardWeight(x, dy, weight_grad_, bias_grad_, accumulate);
  if (has_bias()) grad_ready(1);
  grad_ready(0);
  if (dx != nullptr) convolution.BackwardInput(dy, weight_, dx);
}

}  // namespace nn
