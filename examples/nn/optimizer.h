// SPDX-License-Identifier: Apache-2.0
// Optimizers over flat memory, with PyTorch's formulas.
#ifndef EXAMPLES_NN_OPTIMIZER_H_
#define EXAMPLES_NN_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/kernels.h"
#include "hwy/aligned_allocator.h"

namespace nn {

// A part of an optimizer's state, to save in a checkpoint and to restore. Borrowed memory; its floats have the same
// layout as the values.
struct NamedState {
  std::string name;
  absl::Span<float> data;
};

// Updates parameters from their gradients. Values and gradients are one flat range each, with the same layout. Padding
// whose value and gradient are zero stays zero.
//
//   nn::Sgd optimizer(value.size(), {.lr = 0.1, .momentum = 0.9});
//   optimizer.Step(value, grad);
//
// To resume, copy the saved floats to state() and pass the saved number to set_steps(). Thread-safety: one thread at a
// time.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  virtual void Step(absl::Span<float> value, absl::Span<const float> grad) = 0;

  // Empty for an optimizer without state.
  virtual std::vector<NamedState> state() = 0;

  // For learning rate schedules.
  virtual double lr() const = 0;
  virtual void set_lr(double lr) = 0;

  // Multiplies each gradient by this factor when it is read: 1, or the inverse of the loss scale.
  void set_grad_scale(float grad_scale) { grad_scale_ = grad_scale; }

  // If the norm of the gradients, after this factor, is above clip_norm, the step scales them down to it when it reads
  // them (like torch.nn.utils.clip_grad_norm_ before the step). 0: no clipping. A norm that is not finite does not
  // clip.
  void set_clip_norm(double clip_norm) { clip_norm_ = clip_norm; }

  // The number of steps so far, without the skipped ones. Waits for a GPU.
  virtual int64_t steps() { return steps_; }
  virtual void set_steps(int64_t steps) { steps_ = steps; }

  // Sets the words for all later steps on a GPU. Without effect on the CPU, where the caller decides.
  void set_words(const StepWords& words) { words_ = words; }

 protected:
  // grad_scale_ times the clipping factor.
  float ClippedScale(absl::Span<const float> grad) const;

  int64_t steps_ = 0;
  float grad_scale_ = 1;
  double clip_norm_ = 0;
  StepWords words_;
};

struct SgdOptions {
  double lr = 0.01;
  double momentum = 0;
  double weight_decay = 0;
};

// torch.optim.SGD without dampening or Nesterov:
//   g = grad + weight_decay * value;  m = momentum * m + g, m being 0 at first;  value -= lr * m
class Sgd final : public Optimizer {
 public:
  Sgd(size_t count, const SgdOptions& options);

  void Step(absl::Span<float> value, absl::Span<const float> grad) override;
  std::vector<NamedState> state() override;  // "momentum", unless that is 0
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override { options_.lr = lr; }

 private:
  SgdOptions options_;
  size_t count_;
  hwy::AlignedFreeUniquePtr<float[]> momentum_;  // null without momentum
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient, as torch.optim.Adam does
  // Weight decay is taken off the value instead, as torch.optim.AdamW does (Loshchilov and Hutter, "Decoupled Weight
  // Decay Regularization", 2019): value *= 1 - lr * weight_decay, and g = grad.
  bool decoupled = false;
};

// Those coefficients that are the same in every step; the other two, step_size and rsqrt_correction, are 0.
AdamCoefficients ConstantCoefficients(const AdamOptions& options, float grad_scale);

// torch.optim.Adam: with t the number of this step, from 1,
//   g = grad + weight_decay * value;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
//   value -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
class Adam final : public Optimizer {
 public:
  Adam(size_t count, const AdamOptions& options);

  void Step(absl::Span<float> value, absl::Span<const float> grad) override;
  std::vector<NamedState> state() override;  // "exp_avg", "exp_avg_sq"
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override { options_.lr = lr; }

 private:
  AdamOptions options_;
  size_t count_;
  hwy::AlignedFreeUniquePtr<float[]> mean_;
  hwy::AlignedFreeUniquePtr<float[]> square_;
};

}  // namespace nn

#endif  // EXAMPLES_NN_OPTIMIZER_H_
