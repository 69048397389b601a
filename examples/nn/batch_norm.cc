// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "examples/nn/check.h"
#include "examples/nn/kernels.h"
#include "examples/nn/moments.h"
#include "examples/nn/sync_group.h"

namespace nn {
namespace {

bool AllFinite(absl::Span<const float> numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](float x) { return std::isfinite(x); });
}

}  // namespace

// What synchronisation needs. Arrays with a number for each channel, and for the channels that pad a block: there the
// weight and the bias are 0, and so are y and dx.
struct BatchNorm2d::Together {
  Together(SyncGroup& g, size_t channels, size_t padded)
      : group(g), moments(2 * padded), mine(MomentFloats(channels)), told(mine.size() * static_cast<size_t>(g.size())) {
    for (std::vector<float>* v : {&mean, &rstd, &weight, &bias}) v->resize(padded);
    sums.resize(2 * channels);
    means.resize(2 * padded);
  }

  SyncGroup& group;
  std::vector<double> moments;      // of this rank; then the sums of its gradients
  std::vector<float> mine, told;    // what ranks exchange
  std::vector<float> mean, rstd;    // of the batches of all ranks
  double count = 0;                 // of values in a channel of these
  std::vector<float> weight, bias;  // of the last Forward
  std::vector<float> sums, means;   // of gradients, of all ranks
};

BatchNorm2d::~BatchNorm2d() = default;

void BatchNorm2d::Synchronize(SyncGroup* group) {
  together_.reset();
  if (group == nullptr || group->size() == 1) return;
  together_ = std::make_unique<Together>(*group, mean_.size(), Images(1).channels());
}

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
  if (together_ != nullptr) {
    ForwardTogether(x, y, rows);
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
  for (size_t c = 0; c < mean_.size(); ++c) MoveRunning(c, mean_[c], variance_[c] * unbiased);
}

void BatchNorm2d::MoveRunning(size_t channel, float mean, float variance) {
  running_mean_[channel] += kBatchNormMomentum * (mean - running_mean_[channel]);
  running_var_[channel] += kBatchNormMomentum * (variance - running_var_[channel]);
}

void BatchNorm2d::Backward(const float* x, const float* /*y*/, float* dy, float* dx, int rows, bool accumulate,
                           GradReadyFn grad_ready) {
  NN_CHECK(training_);
  if (together_ != nullptr) {
    BackwardTogether(x, dy, dx, rows, accumulate, grad_ready);
    return;
  }
  NormalizationFor(rows).Backward(x, dy, weight_, bias_, mean_.data(), variance_.data(), dscale_.data(), dshift_.data(),
                                  dx == nullptr ? dy : dx);
  WriteGrads(accumulate, grad_ready);
}

void BatchNorm2d::WriteGrads(bool accumulate, GradReadyFn grad_ready) {
  for (size_t c = 0; c < mean_.size(); ++c) {
    weight_grad_[c] = dscale_[c] + (accumulate ? weight_grad_[c] : 0);
    bias_grad_[c] = dshift_[c] + (accumulate ? bias_grad_[c] : 0);
  }
  grad_ready(1);
  grad_ready(0);
}

BlockedImages BatchNorm2d::Images(int rows) const {
  const auto block = static_cast<size_t>(session_->Block(shape_.channels));
  return {static_cast<size_t>(rows), (static_cast<size_t>(shape_.channels) + block - 1) / block, Pixels(1, shape_),
          block};
}

NormCoefficients BatchNorm2d::Coefficients() const {
  const Together& t = *together_;
  return {t.mean.data(), t.rstd.data(), t.weight.data(), t.bias.data(), activation_ == Activation::kRelu};
}

void BatchNorm2d::ForwardTogether(const float* x, float* y, int rows) {
  Together& t = *together_;
  const BlockedImages images = Images(rows);
  const size_t channels = mean_.size();
  double* const mean = t.moments.data();
  double* const variance = mean + images.channels();
  BatchMoments(images, x, mean, variance);
  std::copy_n(mean, channels, t.mine.begin());
  std::copy_n(variance, channels, t.mine.begin() + static_cast<std::ptrdiff_t>(channels));
  t.mine.back() = static_cast<float>(Pixels(rows, shape_));
  t.group.Gather(t.mine.data(), t.mine.size(), t.told.data());
  for (size_t c = 0; c < channels; ++c) {
    const Moments all = MergeMoments(t.told.data(), static_cast<size_t>(t.group.size()), channels, c);
    t.mean[c] = static_cast<float>(all.mean);
    t.rstd[c] = static_cast<float>(1 / std::sqrt(all.variance + static_cast<double>(kBatchNormEpsilon)));
    t.count = all.count;
    MoveRunning(c, t.mean[c], static_cast<float>(all.variance * (all.count / (all.count - 1))));
  }
  std::copy_n(weight_, channels, t.weight.begin());
  std::copy_n(bias_, channels, t.bias.begin());
  NormForward(images, x, Coefficients(), y);
}

void BatchNorm2d::BackwardTogether(const float* x, const float* dy, float* dx, int rows, bool accumulate,
                                   GradReadyFn grad_ready) {
  Together& t = *together_;
  const BlockedImages images = Images(rows);
  const size_t channels = mean_.size(), padded = images.channels();
  double* const sums = t.moments.data();
  NormGradSums(images, x, dy, Coefficients(), sums);
  std::copy_n(sums, channels, dshift_.begin());
  std::copy_n(sums + padded, channels, dscale_.begin());
  WriteGrads(accumulate, grad_ready);
  if (dx == nullptr) return;
  std::copy(dshift_.begin(), dshift_.end(), t.sums.begin());
  std::copy(dscale_.begin(), dscale_.end(), t.sums.begin() + static_cast<std::ptrdiff_t>(channels));
  t.group.Sum(t.sums.data(), t.sums.size());
  for (size_t c = 0; c < channels; ++c) {
    t.means[c] = static_cast<float>(static_cast<double>(t.sums[c]) / t.count);
    t.means[padded + c] = static_cast<float>(static_cast<double>(t.sums[channels + c]) / t.count);
  }
  NormBackward(images, x, dy, Coefficients(), t.means.data(), dx);
}

}  // namespace nn
