// The loss of a classifier, and how often it is right.
#ifndef EXAMPLES_NN_LOSS_H_
#define EXAMPLES_NN_LOSS_H_

#include <cstdint>

#include "absl/types/span.h"

namespace nn {

struct LossOptions {
  // What the label's share of 1 loses, spread evenly over all classes: 0 to 1. (Szegedy et al., "Rethinking the
  // Inception Architecture for Computer Vision", 2016; torch's cross_entropy has the same.)
  float label_smoothing = 0;
  // The gradient is multiplied by it: 1 / k where k batches are accumulated to one.
  float grad_scale = 1;
};

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
