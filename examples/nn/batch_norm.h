// Batch normalisation (Ioffe and Szegedy, 2015).
#ifndef EXAMPLES_NN_BATCH_NORM_H_
#define EXAMPLES_NN_BATCH_NORM_H_

#include <vector>

#include "absl/types/span.h"
#include "examples/nn/layer.h"
#include "examples/nn/linear.h"
#include "examples/nn/onednn_image.h"
#include "examples/nn/per_rows.h"

namespace nn {

// torch.nn.BatchNorm2d with its defaults, with the activation fused: y = activation((x - mean) / sqrt(variance + 1e-5)
// * weight + bias), for each channel. In training mean and variance are the batch's own, and the buffers
// "running_mean" and "running_var" (unbiased) follow them by a tenth of the difference; in evaluation they are those
// buffers. Native images in and out.
class BatchNorm2d final : public Layer {
 public:
  BatchNorm2d(onednn::SessionPtr session, const ImageShape& shape, Activation activation, int max_batch);

  int input_size() const override { return static_cast<int>(session_->Floats(shape_, Layout::kNative)); }
  int output_size() const override { return input_size(); }
  absl::Span<const ParameterSpec> parameters() const override { return parameters_; }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) override;
  std::vector<LayerBuffer> buffers() override;
  void SetTraining(bool training) override { training_ = training; }
  void Forward(const float* x, float* y, int rows) override;
  // dx may be dy. Null: only the parameters' gradients are of use to the caller.
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  onednn::BatchNormalization& NormalizationFor(int rows);

  onednn::SessionPtr session_;
  ImageShape shape_;
  Activation activation_;
  int max_batch_;
  bool training_ = true;
  std::vector<ParameterSpec> parameters_;
  PerRows<onednn::BatchNormalization> normalizations_;
  std::vector<float> mean_, variance_;  // of the last batch
  std::vector<float> running_mean_, running_var_;
  std::vector<float> dscale_, dshift_;
  const float* weight_ = nullptr;
  const float* bias_ = nullptr;
  float* weight_grad_ = nullptr;
  float* bias_grad_ = nullptr;
};

}  // namespace nn

#endif  // EXAMPLES_NN_BATCH_NORM_H_
