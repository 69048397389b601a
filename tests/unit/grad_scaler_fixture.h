// SPDX-License-Identifier: Apache-2.0
// What the tests of GradScaler have in common.
#ifndef TESTS_UNIT_GRAD_SCALER_FIXTURE_H_
#define TESTS_UNIT_GRAD_SCALER_FIXTURE_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "ddp/grad_scaler.h"
#include "tests/support/catch.h"

namespace ddp {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// value -= 0.1 * gradient, or with another type of gradients only a count of steps.
class TestOptimizer final : public Optimizer {
 public:
  explicit TestOptimizer(bool fused, std::vector<float> grads = {1, 2, 3}, std::vector<float> values = {10, 20, 30})
      : grads_(std::move(grads)), values_(std::move(values)), fused_(fused) {
    if (!grads_.empty()) buffers_ = {{grads_.data(), grads_.size(), DType::kFloat32, {}}};
  }
  // Gradients of another type, or in several ranges.
  TestOptimizer(bool fused, std::vector<Buffer> buffers) : buffers_(std::move(buffers)), fused_(fused) {}

  Buffers grads() const override { return buffers_; }
  bool fused() const override { return fused_; }
  absl::Status Step(const StepOptions& options) override {
    last_ = options;
    if (!next_.ok()) return next_;
    if (options.found_inf != nullptr && *options.found_inf != 0) return absl::OkStatus();
    const float inv_scale = options.inv_scale == nullptr ? 1 : *options.inv_scale;
    for (size_t i = 0; i < values_.size(); ++i) values_[i] -= 0.1f * (grads_[i] * inv_scale);
    ++steps_;
    return absl::OkStatus();
  }

  std::vector<float> grads_, values_;
  std::vector<Buffer> buffers_;
  bool fused_;
  StepOptions last_;
  absl::Status next_;
  int steps_ = 0;
};

inline std::unique_ptr<GradScaler> Make(const GradScalerOptions& options = {}) {
  absl::StatusOr<std::unique_ptr<GradScaler>> scaler = GradScaler::Create(options);
  INFO(scaler.status().ToString());
  REQUIRE(scaler.ok());
  return *std::move(scaler);
}

inline void Require(const absl::Status& status) {
  INFO(status.ToString());
  REQUIRE(status.ok());
}

inline void RequireError(const absl::Status& status, absl::StatusCode code, const std::string& part) {
  INFO(status.ToString());
  REQUIRE(status.code() == code);
  REQUIRE(absl::StrContains(status.message(), part));
}

inline float ScaleOf(GradScaler& scaler) {
  const absl::StatusOr<float> scale = scaler.scale();
  REQUIRE(scale.ok());
  return *scale;
}

inline int TrackerOf(GradScaler& scaler) {
  const absl::StatusOr<GradScalerState> state = scaler.State();
  REQUIRE(state.ok());
  return state->growth_tracker;
}

// The loss's gradient, so that a scaler knows that something was scaled.
inline void ScaleSomething(GradScaler& scaler) {
  float loss = 1;
  Require(scaler.Scale({{&loss, 1, DType::kFloat32, {}}}));
}

// One whole step with these gradients, already scaled.
inline void StepWith(GradScaler& scaler, TestOptimizer& optimizer, float grad) {
  ScaleSomething(scaler);
  for (float& g : optimizer.grads_) g = grad;
  Require(scaler.Step(optimizer));
  Require(scaler.Update());
}

}  // namespace ddp

#endif  // TESTS_UNIT_GRAD_SCALER_FIXTURE_H_
