#include "examples/nn/batch_norm.h"

#include <algorithm>
#include <utility>

#include "examples/nn/check.h"

namespace nn {

BatchNorm2d::BatchNorm2d(onednn::SessionPtr session, const ImageShape& shape, Activation activation, int max_batch)
    : WeightedLayer(shape.channels),
      session_(std::move(session)),
      shape_(shape),
      activation_(activation),
      max_batch_(max_batch) {
  NN_CHECK(shape.channels > 0 && max_batch > 0);
  const auto channels = static_cast<size_t>(shape.channels);
  for (std::vector<float>* v : {&mean_, &variance_, &running_mean_, &dscale_, &dshift_}) v->resize(channels);
  running_var_.assign(channels, 1.0f);
  NormalizationFor(max_batch);
}

onednn::BatchNormalization& BatchNorm2d::NormalizationFor(int rows) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  return normalizations_.Get(rows, [&] {
    return std::make_unique<onednn::BatchNormalization>(session_, shape_, rows, kBatchNormEpsilon,
                                                        activation_ == Activation::kRelu);
  });
}

std::vector<LayerBuffer> BatchNorm2d::buffers() {
  return {{"running_mean", {shape_.channels}, absl::MakeSpan(running_mean_)},
          {"running_var", {shape_.channels}, absl::MakeSpan(running_var_)}};
}

void BatchNorm2d::Forward(const float* x, float* y, int rows) {
  NN_CHECK(weight_ != nullptr);
  onednn::BatchNormalization& normalization = NormalizationFor(rows);
  if (!training_) {
    normalization.ForwardEvaluation(x, weight_, bias_, running_mean_.data(), running_var_.data(), y);
    return;
  }
  normalization.ForwardTraining(x, weight_, bias_, mean_.data(), variance_.data(), y);
  const float count = static_cast<float>(rows) * static_cast<float>(shape_.height * shape_.width);
  const float unbiased = count / std::max(count - 1, 1.0f);
  for (size_t c = 0; c < mean_.size(); ++c) {
    running_mean_[c] += kBatchNormMomentum * (mean_[c] - running_mean_[c]);
    running_var_[c] += kBatchNormMomentum * (variance_[c] * unbiased - running_var_[c]);
  }
}

void BatchNorm2d::Backward(const float* x, const float* /*y*/, float* dy, float* dx, int rows, bool accumulate,
                           GradReadyFn grad_ready) {
  NN_CHECK(training_);
  NormalizationFor(rows).Backward(x, dy, weight_, bias_, mean_.data(), variance_.data(), dscale_.data(), dshift_.data(),
                                  dx == nullptr ? dy : dx);
  for (size_t c = 0; c < mean_.size(); ++c) {
    weight_grad_[c] = dscale_[c] + (accumulate ? weight_grad_[c] : 0);
    bias_grad_[c] = dshift_[c] + (accumulate ? bias_grad_[c] : 0);
  }
  grad_ready(1);
  grad_ready(0);
}

}  // namespace nn
