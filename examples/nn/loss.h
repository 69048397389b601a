// SPDX-License-Identifier: Apache-2.0
// The loss and the accuracy of a classifier.
#ifndef EXAMPLES_NN_LOSS_H_
#define EXAMPLES_NN_LOSS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "examples/nn/loss_options.h"

namespace nn {

// Returns the mean over the rows of sum_j -target[j] log softmax(row)[j], where the target is 1 for the label and 0
// otherwise, or smoothed. Also writes the gradient of this mean with respect to the logits: (softmax - target) / rows.
// `logits` and `dlogits` are row-major [labels.size(), classes]; `dlogits` may be larger. Labels are from 0 to
// classes - 1. The result is finite for every finite input, because the largest logit of each row is subtracted before
// exp.
double SoftmaxCrossEntropy(absl::Span<const float> logits, absl::Span<const int32_t> labels, absl::Span<float> dlogits,
                           const LossOptions& options = {});

// Returns the number of rows whose largest logit (the first of equal ones) is that of the label.
int64_t CountCorrect(absl::Span<const float> logits, absl::Span<const int32_t> labels);

}  // namespace nn

#endif  // EXAMPLES_NN_LOSS_H_
