// The loss of a classifier, and how often it is right.
#ifndef EXAMPLES_NN_LOSS_H_
#define EXAMPLES_NN_LOSS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "examples/nn/loss_options.h"

namespace nn {

// The mean over the rows of sum_j -target[j] log softmax(row)[j], where the target is 1 for the label and 0 elsewhere,
// or smoothed. Also writes the gradient of that mean with respect to the logits: (softmax - target) / rows. `logits`
// and `dlogits` (which may have room for more) are row-major [labels.size(), classes]; every label is in 0 .. classes
// - 1. Finite for every finite input: each row's largest logit is subtracted before exponentials are taken.
double SoftmaxCrossEntropy(absl::Span<const float> logits, absl::Span<const int32_t> labels, absl::Span<float> dlogits,
                           const LossOptions& options = {});

// In how many rows the largest logit (the first of equals) is the label's.
int64_t CountCorrect(absl::Span<const float> logits, absl::Span<const int32_t> labels);

}  // namespace nn

#endif  // EXAMPLES_NN_LOSS_H_
