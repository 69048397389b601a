// SPDX-License-Identifier: Apache-2.0
// The convolutional layer.
#ifndef EXAMPLES_NN_CONV2D_H_
#define EXAMPLES_NN_CONV2D_H_

#include "examples/nn/image_layers.h"
#include "examples/nn/onednn_image.h"
#include "examples/nn/per_rows.h"
#include "examples/nn/weighted_layer.h"

namespace nn {

// y = activation(x * W + b), with W "weight" [outputs, channels, kernel, kernel] and b "bias" [outputs]:
// torch.nn.Conv2d on the CPU, with the activation fused into its last store. Parameters and activations are float32. In
// a ddp::Autocast scope for bfloat16, the factors of products are rounded to bfloat16, in Forward and in its Backward.
// This needs onednn::HasBfloat16().
class Conv2d final : public WeightedLayer {
 public:
  Conv2d(onednn::SessionPtr session, const Conv2dOptions& options, int max_batch);

  int input_size() const override;
  int output_size() const override;
  ImageShape output_shape() const { return shape_.out(); }
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  onednn::Convolution& ConvolutionFor(int rows, bool bfloat16);

  onednn::SessionPtr session_;
  onednn::ConvolutionShape shape_;
  Activation activation_;
  int max_batch_;
  PerRows<onednn::Convolution> convolutions_, bfloat16_convolutions_;
  bool bfloat16_ = false;  // the last Forward used bfloat16
};

}  // namespace nn

#endif  // EXAMPLES_NN_CONV2D_H_
