// SPDX-License-Identifier: Apache-2.0
// The blocks of residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015).
#ifndef EXAMPLES_NN_RESIDUAL_H_
#define EXAMPLES_NN_RESIDUAL_H_

#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/batch_norm.h"
#include "examples/nn/conv2d.h"
#include "examples/nn/layer.h"
#include "examples/nn/layer_parts.h"
#include "hwy/aligned_allocator.h"

namespace nn {

// y = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)), with 3x3 convolutions without bias; the first one has
// `stride`. The shortcut is the paper's option A: every stride-th pixel of each row and column, and zeros for the
// channels that x does not have. Parameters and buffers have names such as "conv1.weight", "bn1.weight",
// "bn1.running_mean". Native images in and out.
class BasicBlock final : public CompositeLayer {
 public:
  BasicBlock(const onednn::SessionPtr& session, const ImageShape& in, int outputs, int stride, int max_batch);

  int input_size() const override { return conv1_.input_size(); }
  int output_size() const override { return bn2_.output_size(); }
  ImageShape output_shape() const { return conv1_.output_shape(); }
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  // Calls fn(floats of the input image, floats of the output image, count) for each range of channels of the shortcut.
  template <class Fn>
  void ForEachStretch(int rows, const Fn& fn) const;

  onednn::SessionPtr session_;
  ImageShape in_;
  int stride_;
  Conv2d conv1_;
  BatchNorm2d bn1_;
  Conv2d conv2_;
  BatchNorm2d bn2_;
  hwy::AlignedFreeUniquePtr<float[]> outputs_[3];  // outputs of all layers but bn2
};

// y = relu(bn(conv(relu(bn(conv(relu(bn(conv(x)))))))) + shortcut(x)), with convolutions of 1x1, 3x3 (with the stride)
// and 1x1 pixels without bias. The shortcut is x, or, where y has another shape, bn(conv(x)) with 1x1 pixels and the
// stride: the paper's option B. Parameters and buffers are named as in nn.Sequentials "body" (Conv2d, BatchNorm2d,
// ReLU, Conv2d, ...) and "shortcut" (Conv2d, BatchNorm2d): "body.0.weight", "shortcut.1.running_mean". Native images in
// and out.
class Bottleneck final : public CompositeLayer {
 public:
  Bottleneck(const onednn::SessionPtr& session, const BottleneckOptions& options, int max_batch);

  int input_size() const override { return conv1_.input_size(); }
  int output_size() const override { return bn3_.output_size(); }
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  struct Projection {
    Conv2d conv;
    BatchNorm2d bn;
    hwy::AlignedFreeUniquePtr<float[]> output;  // of conv
  };

  onednn::SessionPtr session_;
  Conv2d conv1_;
  BatchNorm2d bn1_;
  Conv2d conv2_;
  BatchNorm2d bn2_;
  Conv2d conv3_;
  BatchNorm2d bn3_;
  std::unique_ptr<Projection> projection_;         // null: the shortcut is x
  hwy::AlignedFreeUniquePtr<float[]> outputs_[5];  // outputs of all layers of the body but bn3
};

}  // namespace nn

#endif  // EXAMPLES_NN_RESIDUAL_H_
