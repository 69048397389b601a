// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/loss.h"

#include <algorithm>
#include <cmath>

#include "examples/nn/check.h"

namespace nn {
namespace {

size_t Classes(absl::Span<const float> logits, absl::Span<const int32_t> labels) {
  NN_CHECK(!labels.empty() && !logits.empty() && logits.size() % labels.size() == 0);
  return logits.size() / labels.size();
}

}  // namespace

double SoftmaxCrossEntropy(absl::Span<const float> logits, absl::Span<const int32_t> labels, absl::Span<float> dlogits,
                           const LossOptions& options) {
  const size_t classes = Classes(logits, labels);
  NN_CHECK(dlogits.size() >= logits.size());
  NN_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1);
  const float loss_scale = options.loss_scale == nullptr ? 1 : *options.loss_scale;
  const float per_row = options.grad_scale * loss_scale / static_cast<float>(labels.size());
  const float everywhere =
      options.label_smoothing / static_cast<float>(classes);  // a target of a class not the label's
  double loss = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto label = static_cast<size_t>(labels[i]);
    NN_CHECK(label < classes);
    const absl::Span<const float> row = logits.subspan(i * classes, classes);
    const absl::Span<float> grad = dlogits.subspan(i * classes, classes);
    const float largest = *std::max_element(row.begin(), row.end());
    float sum = 0;  // at least 1, for the largest contributes exp(0)
    for (size_t j = 0; j < classes; ++j) sum += grad[j] = std::exp(row[j] - largest);
    for (float& g : grad) g = g * (per_row / sum) - everywhere * per_row;
    grad[label] -= (1 - options.label_smoothing) * per_row;
    // Relative to the largest logit, so that large logits cancel before they are rounded.
    const auto below = [largest](float x) { return static_cast<double>(x) - static_cast<double>(largest); };
    loss += std::log(sum) - (1.0 - static_cast<double>(options.label_smoothing)) * below(row[label]);
    if (options.label_smoothing > 0) {  // otherwise 0 times -infinity would be a NaN
      for (const float x : row) loss -= static_cast<double>(everywhere) * below(x);
    }
  }
  return loss / static_cast<double>(labels.size());
}

int64_t CountCorrect(absl::Span<const float> logits, absl::Span<const int32_t> labels) {
  if (labels.empty()) return 0;
  const size_t classes = Classes(logits, labels);
  int64_t correct = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i * classes);
    correct += std::max_element(row, row + static_cast<std::ptrdiff_t>(classes)) - row == labels[i];
  }
  return correct;
}

}  // namespace nn
