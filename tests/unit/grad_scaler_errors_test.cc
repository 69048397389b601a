// SPDX-License-Identifier: Apache-2.0
// GradScaler used in ways that it refuses, or not enabled.
#include "ddp/grad_scaler.h"

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/numbers.h"
#include "tests/unit/grad_scaler_fixture.h"

namespace ddp {

TEST_CASE("a state that no scaler has is refused, and nothing is loaded") {
  const auto scaler = Make();
  const GradScalerState good = *scaler->State();
  const auto refused = [&](auto change, const std::string& part) {
    GradScalerState state = good;
    change(state);
    RequireError(scaler->Load(state), absl::StatusCode::kInvalidArgument, part);
    CHECK(*scaler->State() == good);
  };
  refused([](GradScalerState& s) { s.scale = kInf; }, "scale of inf");
  refused([](GradScalerState& s) { s.scale = 0; }, "above 0");
  refused([](GradScalerState& s) { s.scale = -1; }, "above 0");
  refused([](GradScalerState& s) { s.growth_factor = 1; }, "growth_factor");
  refused([](GradScalerState& s) { s.backoff_factor = 1; }, "backoff_factor");
  refused([](GradScalerState& s) { s.growth_interval = 0; }, "growth_interval");
  refused([](GradScalerState& s) { s.growth_tracker = -1; }, "growth_tracker");
  refused([](GradScalerState& s) { s.hysteresis_tracker = -1; }, "hysteresis_tracker");
}

TEST_CASE("a scaler that is not enabled does nothing") {
  const auto scaler = Make({.enabled = false});
  CHECK_FALSE(scaler->enabled());
  CHECK(ScaleOf(*scaler) == 1);
  CHECK(scaler->scale_data() == nullptr);
  TestOptimizer optimizer(false, {1, kInf, 1});
  float loss = 3;
  Require(scaler->Scale({{&loss, 1, DType::kFloat32, {}}}));
  CHECK(loss == 3);
  Require(scaler->Unscale(optimizer));
  Require(scaler->Step(optimizer));
  Require(scaler->Step(optimizer));
  CHECK(optimizer.steps_ == 2);
  CHECK(optimizer.last_.inv_scale == nullptr);
  CHECK(optimizer.last_.found_inf == nullptr);
  CHECK_FALSE(*scaler->FoundInf(optimizer));
  Require(scaler->Update());
  Require(scaler->Update(7.0f));
  CHECK(ScaleOf(*scaler) == 1);
  const GradScalerState state = *scaler->State();
  CHECK_FALSE(state.enabled);
  Require(scaler->Load(*Make()->State()));
  CHECK(ScaleOf(*scaler) == 1);
  RequireError(Make()->Load(state), absl::StatusCode::kFailedPrecondition, "not enabled");
}

TEST_CASE("calls in the wrong order are refused") {
  const auto wrong = absl::StatusCode::kFailedPrecondition;
  for (const bool fused : {false, true}) {
    const auto scaler = Make();
    TestOptimizer optimizer(fused), other(fused);
    RequireError(scaler->Unscale(optimizer), wrong, "Unscale before anything was scaled");
    RequireError(scaler->Step(optimizer), wrong, "Step before anything was scaled");
    RequireError(scaler->Update(), wrong, "Update before anything was scaled");
    CHECK(optimizer.steps_ == 0);
    ScaleSomething(*scaler);
    RequireError(scaler->Update(), wrong, "no optimizer's gradients have been looked at");
    RequireError(scaler->FoundInf(optimizer).status(), wrong, "have not been looked at");
    Require(scaler->Unscale(optimizer));
    RequireError(scaler->Unscale(optimizer), wrong, "already been unscaled");
    CHECK(optimizer.grads_[0] == 1.0f / 65536);
    Require(scaler->Step(optimizer));
    RequireError(scaler->Unscale(optimizer), wrong, "already stepped");
    RequireError(scaler->Step(optimizer), wrong, "already stepped");
    CHECK(optimizer.steps_ == 1);
    Require(scaler->Step(other));  // each optimizer for itself
    Require(scaler->Update());
    RequireError(scaler->Update(), wrong, "no optimizer's gradients have been looked at");
    RequireError(scaler->FoundInf(optimizer).status(), wrong, "have not been looked at");
    Require(scaler->Unscale(optimizer));
    TestOptimizer empty(fused, {}, {});
    RequireError(scaler->Step(empty), wrong, "no gradients");
    float inverse = 1;
    RequireError(scaler->Step(other, {.inv_scale = &inverse}), absl::StatusCode::kInvalidArgument, "inv_scale");
  }
}

TEST_CASE("an optimizer's failure is the step's, which may be tried again") {
  for (const bool fused : {false, true}) {
    const auto scaler = Make({.initial_scale = 2});
    TestOptimizer optimizer(fused);
    ScaleSomething(*scaler);
    optimizer.next_ = absl::InternalError("out of luck");
    RequireError(scaler->Step(optimizer), absl::StatusCode::kInternal, "out of luck");
    optimizer.next_ = absl::OkStatus();
    Require(scaler->Step(optimizer));
    CHECK(optimizer.values_[0] == 10 - 0.1f * 0.5f);  // unscaled once
  }
}

TEST_CASE("float16 gradients are for fused steps only") {
  const auto scaler = Make({.initial_scale = 4});
  ScaleSomething(*scaler);
  uint16_t half[3];
  for (size_t i = 0; i < 3; ++i) testing::SetElement(DType::kFloat16, half, i, 8);
  const Buffer buffer = {half, 3, DType::kFloat16, {}};
  TestOptimizer plain(false, std::vector<Buffer>{buffer}), fused(true, std::vector<Buffer>{buffer});
  for (TestOptimizer* optimizer : {&plain, &fused}) {
    RequireError(scaler->Unscale(*optimizer), absl::StatusCode::kInvalidArgument, "float16");
  }
  RequireError(scaler->Step(plain), absl::StatusCode::kInvalidArgument, "float16");
  CHECK(plain.steps_ == 0);
  CHECK(testing::GetElement(DType::kFloat16, half, 0) == 8);
  Require(scaler->Step(fused));
  CHECK(fused.steps_ == 1);
  CHECK(*fused.last_.inv_scale == 0.25f);
  Require(scaler->Update());
  testing::SetElement(DType::kFloat16, half, 1, 1e9);  // infinity
  Require(scaler->Step(fused));
  CHECK(fused.steps_ == 1);
  int32_t number = 1;
  TestOptimizer whole(true, std::vector<Buffer>{{&number, 1, DType::kInt32, {}}});
  RequireError(scaler->Step(whole), absl::StatusCode::kInvalidArgument, "int32");
}

TEST_CASE("options that make no sense are refused") {
  const auto refused = [](const GradScalerOptions& options, const std::string& part) {
    RequireError(GradScaler::Create(options).status(), absl::StatusCode::kInvalidArgument, part);
  };
  refused({.growth_factor = 1}, "growth_factor is 1; it must be above 1");
  refused({.growth_factor = kInf}, "growth_factor");
  refused({.backoff_factor = 1}, "backoff_factor");
  refused({.backoff_factor = 0}, "backoff_factor");
  refused({.growth_interval = 0}, "growth_interval");
  refused({.initial_scale = 0.5}, "min_scale");
  refused({.initial_scale = kNan}, "scale of nan");
  refused({.min_scale = 0}, "min_scale is 0");
  refused({.hysteresis = 0}, "hysteresis");
  const GradScalerOptions no_such_gpu = {.device = {Device::Kind::kCuda, 99}};
  CHECK(!GradScaler::Create(no_such_gpu).ok());
  const auto scaler = Make();
  ScaleSomething(*scaler);
  float grad = 1;
  TestOptimizer elsewhere(true, std::vector<Buffer>{{&grad, 1, DType::kFloat32, {Device::Kind::kCuda, 0}}});
  RequireError(scaler->Step(elsewhere), absl::StatusCode::kInvalidArgument, "not on the scaler's device");
}

}  // namespace ddp
