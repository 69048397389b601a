// SPDX-License-Identifier: Apache-2.0
// Layers without parameters: pooling, flattening, dropout.
#ifndef EXAMPLES_NN_POOLING_H_
#define EXAMPLES_NN_POOLING_H_

#include <cstdint>
#include <vector>

#include "examples/nn/image_layers.h"
#include "examples/nn/kernels.h"
#include "examples/nn/layer.h"
#include "examples/nn/onednn_image.h"
#include "examples/nn/per_rows.h"

namespace nn {

// The maximum of windows of pixels, or the mean of adjacent ones: torch.nn.MaxPool2d and AvgPool2d, or, with one window
// as large as the image, AdaptiveAvgPool2d(1). An activation follows the pooling: a ReLU gives the same result after
// maximum pooling as before it, but from a quarter of the pixels. Native images in and out.
class Pool2d final : public Layer {
 public:
  Pool2d(onednn::SessionPtr session, const Pool2dOptions& options, int max_batch);

  int input_size() const override { return static_cast<int>(session_->Floats(options_.in, Layout::kNative)); }
  int output_size() const override { return static_cast<int>(session_->Floats(options_.out(), Layout::kNative)); }
  absl::Span<const ParameterSpec> parameters() const override { return {}; }
  void Bind(absl::Span<float* const>, absl::Span<float* const>) override {}
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  onednn::AveragePooling& AverageFor(int rows);
  Windows WindowsOf(int rows) const;
  bool relu() const { return options_.activation == Activation::kRelu; }

  onednn::SessionPtr session_;
  Pool2dOptions options_;
  int max_batch_;
  PerRows<onednn::AveragePooling> averages_;
  std::vector<int32_t> which_;  // the pixel of each window that the last Forward chose as its largest
};

// Converts native images to plain rows: torch.nn.Flatten.
class Flatten final : public Layer {
 public:
  Flatten(onednn::SessionPtr session, const ImageShape& shape, int max_batch);

  int input_size() const override { return static_cast<int>(session_->Floats(shape_, Layout::kNative)); }
  int output_size() const override { return shape_.channels * shape_.height * shape_.width; }
  absl::Span<const ParameterSpec> parameters() const override { return {}; }
  void Bind(absl::Span<float* const>, absl::Span<float* const>) override {}
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  onednn::SessionPtr session_;
  ImageShape shape_;
  int max_batch_;
  PerRows<onednn::Relayout> forward_, backward_;
};

// torch.nn.Dropout. In training each float is set to 0 with probability p, and the others are divided by 1 - p. In
// evaluation nothing changes. The seed and the number of training forward passes so far determine which floats are 0.
class Dropout final : public Layer {
 public:
  Dropout(int size, double p, uint64_t seed);

  int input_size() const override { return size_; }
  int output_size() const override { return size_; }
  absl::Span<const ParameterSpec> parameters() const override { return {}; }
  void Bind(absl::Span<float* const>, absl::Span<float* const>) override {}
  void SetTraining(bool training) override { training_ = training; }
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  void Apply(const float* from, float* to, int rows) const;

  int size_;
  double p_;
  uint64_t seed_;
  uint64_t passes_ = 0;
  bool training_ = true;
};

}  // namespace nn

#endif  // EXAMPLES_NN_POOLING_H_
