// Options of a loss.
#ifndef EXAMPLES_NN_LOSS_OPTIONS_H_
#define EXAMPLES_NN_LOSS_OPTIONS_H_

namespace nn {

struct LossOptions {
  // The part of the target (0 to 1) that is taken from the label and spread evenly over all classes. (Szegedy et al.,
  // "Rethinking the Inception Architecture for Computer Vision", 2016; the same as in torch's cross_entropy.)
  float label_smoothing = 0;
  // Factor of the gradient: 1 / k if k batches are accumulated into one.
  float grad_scale = 1;
  // Unless null, another factor of the gradient: a gradient scaler's scale, on the device that computes. It makes small
  // gradients large before they are rounded to 16 bits.
  const float* loss_scale = nullptr;
};

}  // namespace nn

#endif  // EXAMPLES_NN_LOSS_OPTIONS_H_
