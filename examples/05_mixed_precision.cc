// SPDX-License-Identifier: Apache-2.0
// Mixed precision: the gradients of a loss that is multiplied by a scale, so that small ones are not lost in 16 bits. A
// step with an infinity on any rank is skipped on all of them, and the scale shrinks.
//
//   mpirun -n 2 05_mixed_precision    # prints 199 steps, 1 skipped, on both ranks
#include <cmath>
#include <cstdio>
#include <vector>

#include "ddp/ddp.h"

// The program's optimizer, as the scaler sees it.
class Descent : public ddp::Optimizer {
 public:
  Descent(ddp::DistributedDataParallel& model, std::vector<float>& weight) : model_(model), weight_(weight) {}

  ddp::Buffers grads() const override { return model_.grad_spans(); }
  bool fused() const override { return false; }  // the scaler unscales the gradients, and calls Step or does not
  absl::Status Step(const ddp::StepOptions&) override {
    const auto* const grad = static_cast<const float*>(model_.grad(0).data);
    for (size_t i = 0; i < weight_.size(); ++i) weight_[i] -= 0.1f * grad[i];
    ++steps;
    return absl::OkStatus();
  }

  int steps = 0;

 private:
  ddp::DistributedDataParallel& model_;
  std::vector<float>& weight_;
};

absl::Status Train() {
  auto context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  ddp::ProcessGroup& world = (*context)->world();
  std::vector<float> weight(1000, 1.0f);
  const ddp::Parameter parameter{.name = "weight", .value = {weight.data(), weight.size()}};
  auto model = ddp::DistributedDataParallel::Create(world, {parameter});
  if (!model.ok()) return model.status();
  auto scaler = ddp::GradScaler::Create({.initial_scale = 1024});
  if (!scaler.ok()) return scaler.status();
  Descent optimizer(**model, weight);
  auto* const grad = static_cast<float*>((*model)->grad(0).data);

  constexpr int kSteps = 200;
  for (int step = 0; step < kSteps; ++step) {
    float loss_gradient = 1;  // what the backward pass starts with
    if (absl::Status s = (*scaler)->Scale(ddp::Buffer{&loss_gradient, 1}); !s.ok()) return s;
    for (size_t i = 0; i < weight.size(); ++i) grad[i] = loss_gradient * weight[i];
    if (step == 10 && world.rank() == world.size() - 1) grad[3] = INFINITY;  // an overflow on one rank
    (*model)->GradReady(0);
    if (absl::Status s = (*model)->FinishBackward(); !s.ok()) return s;
    if (absl::Status s = (*scaler)->Step(optimizer); !s.ok()) return s;
    if (absl::Status s = (*scaler)->Update(); !s.ok()) return s;
  }
  const auto scale = (*scaler)->scale();
  if (!scale.ok()) return scale.status();
  std::printf("rank %d of %d: %d steps, %d skipped, scale %g, weight %.3f\n", world.rank(), world.size(),
              optimizer.steps, kSteps - optimizer.steps, *scale, weight[0]);
  return absl::OkStatus();
}

int main() {
  const absl::Status status = Train();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
