// SPDX-License-Identifier: Apache-2.0
// Batch normalisation (Ioffe and Szegedy, 2015).
#ifndef EXAMPLES_NN_BATCH_NORM_H_
#define EXAMPLES_NN_BATCH_NORM_H_

#include <memory>
#include <vector>

#include "examples/nn/image_layers.h"
#include "examples/nn/norm_kernels.h"
#include "examples/nn/onednn_image.h"
#include "examples/nn/per_rows.h"
#include "examples/nn/weighted_layer.h"

namespace nn {

// torch.nn.BatchNorm2d with its defaults and a fused activation. For each channel:
//   y = activation((x - mean) / sqrt(variance + 1e-5) * weight + bias)
// In training, mean and variance are those of the batch, and the buffers "running_mean" and "running_var" (unbiased)
// move a tenth of the difference towards them. In evaluation, mean and variance are these buffers. Native images in and
// out.
//
// Synchronised, it is torch.nn.SyncBatchNorm: mean and variance are those of the batches of all ranks, which may have
// different sizes, and so is what they contribute to dx. The gradients of weight and bias are this rank's part of the
// sum over the ranks.
class BatchNorm2d final : public WeightedLayer {
 public:
  BatchNorm2d(onednn::SessionPtr session, const ImageShape& shape, Activation activation, int max_batch);
  ~BatchNorm2d() override;

  int input_size() const override { return static_cast<int>(session_->Floats(shape_, Layout::kNative)); }
  int output_size() const override { return input_size(); }
  std::vector<LayerBuffer> buffers() override;
  void SetTraining(bool training) override { training_ = training; }
  void Synchronize(SyncGroup* group) override;
  void Forward(const float* x, float* y, int rows) override;
  // dx may be dy. If dx is null, only the parameters' gradients are computed.
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  struct Together;

  onednn::BatchNormalization& NormalizationFor(int rows);
  // y = activation((x - mean) / sqrt(variance + eps) * weight + bias); a NaN passes the activation.
  void Apply(const float* x, const float* mean, const float* variance, float* y, int rows);
  BlockedImages Images(int rows) const;
  NormCoefficients Coefficients() const;
  void MoveRunning(size_t channel, float mean, float variance);  // `variance` is unbiased
  void WriteGrads(bool accumulate, GradReadyFn grad_ready);
  void ForwardTogether(const float* x, float* y, int rows);
  void BackwardTogether(const float* x, const float* dy, float* dx, int rows, bool accumulate, GradReadyFn grad_ready);

  onednn::SessionPtr session_;
  ImageShape shape_;
  Activation activation_;
  int max_batch_;
  bool training_ = true;
  PerRows<onednn::BatchNormalization> normalizations_;
  std::vector<float> mean_, variance_;  // of the last batch
  std::vector<float> running_mean_, running_var_;
  std::vector<float> dscale_, dshift_;
  std::unique_ptr<Together> together_;  // if it is synchronised
};

}  // namespace nn

#endif  // EXAMPLES_NN_BATCH_NORM_H_
