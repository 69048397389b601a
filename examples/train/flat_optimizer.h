// SPDX-License-Identifier: Apache-2.0
// Adapts an optimizer of examples/nn to ddp::Optimizer, for libddp's GradScaler.
#ifndef EXAMPLES_TRAIN_FLAT_OPTIMIZER_H_
#define EXAMPLES_TRAIN_FLAT_OPTIMIZER_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ddp/optimizer.h"
#include "examples/nn/optimizer.h"

namespace examples {

// Steps over flat memory and unscales gradients when it reads them. Skips the step if the options say so; on a GPU the
// optimizer's kernels check this themselves. All arguments must outlive it.
class FlatOptimizer final : public ddp::Optimizer {
 public:
  FlatOptimizer(nn::Optimizer& optimizer, absl::Span<float> values, absl::Span<float> grads, ddp::Device device)
      : optimizer_(optimizer),
        values_(values),
        grads_(grads),
        buffer_{grads.data(), grads.size(), ddp::DType::kFloat32, device} {}

  ddp::Buffers grads() const override { return {&buffer_, 1}; }
  bool fused() const override { return true; }

  absl::Status Step(const ddp::StepOptions& options) override {
    if (buffer_.device.kind == ddp::Device::Kind::kCpu) {
      for (const uint32_t* skip : {options.found_inf, options.skip_step}) {
        if (skip != nullptr && *skip != 0) return absl::OkStatus();
      }
      optimizer_.set_grad_scale(options.inv_scale == nullptr ? 1 : *options.inv_scale);
    } else {
      optimizer_.set_words(
          {.inv_scale = options.inv_scale, .found_inf = options.found_inf, .skip_step = options.skip_step});
    }
    optimizer_.Step(values_, grads_);
    return absl::OkStatus();
  }

 private:
  nn::Optimizer& optimizer_;
  absl::Span<float> values_, grads_;
  ddp::Buffer buffer_;
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_FLAT_OPTIMIZER_H_
