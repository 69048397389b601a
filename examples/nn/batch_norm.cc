#include "examples/nn/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "examples/nn/check.h"
#include "examples/nn/kernels.h"

namespace nn {
namespace {

bool AllFinite(absl::Span<const float> numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](float x) { return std::isfinite(x); });
}

}  // namespace

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

void BatchNorm2d::Apply(const float* x, const float* mean, const float* variance, float* y, int rows) {
  NormalizationFor(rows).ForwardEvaluation(x, weight_, bias_, mean, variance, y);
  if (activation_ == Activation::kRelu) Relu(y, static_cast<size_t>(rows) * static_cast<size_t>(output_size()));
}

void BatchNorm2d::Forward(const float* x, float* y, int rows) {
  NN_CHECK(weight_ != nullptr);
  if (!training_) {
    Apply(x, running_mean_.data(), running_var_.data(), y, rows);
    return;
  }
  CheckBatchNormCanTrain(rows, shape_);
  NormalizationFor(rows).ForwardTraining(x, weight_, bias_, mean_.data(), variance_.data(), y);
  // The fused ReLU would hide a NaN. In training a channel has one only if one of these four numbers is not finite.
  const auto finite = [this](const float* numbers) { return AllFinite({numbers, mean_.size()}); };
  const bool may_have_nan = !finite(mean_.data()) || !finite(variance_.data()) || !finite(weight_) || !finite(bias_);
  if (activation_ == Activation::kRelu && may_have_nan) Apply(x, mean_.data(), variance_.data(), y, rows);
  const float count = static_cast<float>(rows) * static_cast<float>(shape_.height * shape_.width);
  const float unbiased = count / (count - 1);
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
