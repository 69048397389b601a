// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/optimizer.h"

#include <algorithm>
#include <cmath>

#include "examples/nn/check.h"
#include "examples/nn/kernels.h"

namespace nn {
namespace {

hwy::AlignedFreeUniquePtr<float[]> Zeros(size_t count) {
  auto floats = hwy::AllocateAligned<float>(count);
  std::fill_n(floats.get(), count, 0.0f);
  return floats;
}

}  // namespace

float Optimizer::ClippedScale(absl::Span<const float> grad) const {
  if (clip_norm_ == 0) return grad_scale_;
  const auto scale = static_cast<double>(grad_scale_);
  return static_cast<float>(scale * ClipFactor(clip_norm_, std::sqrt(SumSquares(grad.data(), grad.size())) * scale));
}

Sgd::Sgd(size_t count, const SgdOptions& options)
    : options_(options), count_(count), momentum_(options.momentum == 0 ? nullptr : Zeros(count)) {}

void Sgd::Step(absl::Span<float> value, absl::Span<const float> grad) {
  NN_CHECK(value.size() == count_ && grad.size() == count_);
  const SgdCoefficients coefficients{.lr = static_cast<float>(options_.lr),
                                     .momentum = static_cast<float>(options_.momentum),
                                     .weight_decay = static_cast<float>(options_.weight_decay),
                                     .grad_scale = ClippedScale(grad)};
  if (momentum_ != nullptr) {
    MomentumPass(coefficients, count_, grad.data(), value.data(), momentum_.get());
  } else {
    SgdPass(coefficients, count_, grad.data(), value.data());
  }
  ++steps_;
}

std::vector<NamedState> Sgd::state() {
  if (momentum_ == nullptr) return {};
  return {{"momentum", absl::MakeSpan(momentum_.get(), count_)}};
}

Adam::Adam(size_t count, const AdamOptions& options)
    : options_(options), count_(count), mean_(Zeros(count)), square_(Zeros(count)) {}

AdamCoefficients ConstantCoefficients(const AdamOptions& options, float grad_scale) {
  return {.step_size = 0,
          .rsqrt_correction = 0,
          .beta1 = static_cast<float>(options.beta1),
          .one_minus_beta1 = static_cast<float>(1 - options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .one_minus_beta2 = static_cast<float>(1 - options.beta2),
          .eps = static_cast<float>(options.eps),
          .weight_decay = options.decoupled ? 0.0f : static_cast<float>(options.weight_decay),
          .grad_scale = grad_scale,
          .keep = options.decoupled ? static_cast<float>(1 - options.lr * options.weight_decay) : 1.0f};
}

void Adam::Step(absl::Span<float> value, absl::Span<const float> grad) {
  NN_CHECK(value.size() == count_ && grad.size() == count_);
  ++steps_;
  const auto t = static_cast<double>(steps_);
  AdamCoefficients coefficients = ConstantCoefficients(options_, ClippedScale(grad));
  coefficients.step_size = static_cast<float>(options_.lr / (1 - std::pow(options_.beta1, t)));
  coefficients.rsqrt_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(options_.beta2, t)));
  AdamPass(coefficients, count_, grad.data(), value.data(), mean_.get(), square_.get());
}

std::vector<NamedState> Adam::state() {
  return {{"exp_avg", absl::MakeSpan(mean_.get(), count_)}, {"exp_avg_sq", absl::MakeSpan(square_.get(), count_)}};
}

}  // namespace nn
