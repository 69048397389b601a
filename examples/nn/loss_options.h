// What a loss is told beside logits and labels.
#ifndef EXAMPLES_NN_LOSS_OPTIONS_H_
#define EXAMPLES_NN_LOSS_OPTIONS_H_

namespace nn {

struct LossOptions {
  // What the label's share of 1 loses, spread evenly over all classes: 0 to 1. (Szegedy et al., "Rethinking the
  // Inception Architecture for Computer Vision", 2016; torch's cross_entropy has the same.)
  float label_smoothing = 0;
  // The gradient is multiplied by it: 1 / k where k batches are accumulated to one.
  float grad_scale = 1;
  // And by what is there, unless it is null: a gradient scaler's scale, on the device that computes. So small gradients
  // are large before they are rounded to 16 bits.
  const float* loss_scale = nullptr;
};

}  // namespace nn

#endif  // EXAMPLES_NN_LOSS_OPTIONS_H_
