// SPDX-License-Identifier: Apache-2.0
// GradScaler on one rank: every rule.
#include "ddp/grad_scaler.h"

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/numbers.h"
#include "tests/unit/grad_scaler_fixture.h"

namespace ddp {

TEST_CASE("the defaults are torch's, with a least scale of 1 and no hysteresis") {
  const auto scaler = Make();
  CHECK(scaler->enabled());
  CHECK(ScaleOf(*scaler) == 65536);
  CHECK(*scaler->State() == GradScalerState{true, 65536, 2, 0.5, 2000, 0, 1});
  const GradScalerOptions options;
  CHECK(options.min_scale == 1);
}

TEST_CASE("Scale multiplies in place, in every floating-point type") {
  const auto scaler = Make({.initial_scale = 1024});
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const size_t count : {1u, 3u, 100u, 1003u}) {
      std::vector<char> memory(count * 8);
      for (size_t i = 0; i < count; ++i) testing::SetElement(dtype, memory.data(), i, static_cast<double>(i % 32));
      const Buffer whole = {memory.data(), count, dtype, {}};
      Require(scaler->Scale({whole}));
      for (size_t i = 0; i < count; ++i) {
        REQUIRE(testing::GetElement(dtype, memory.data(), i) == 1024.0 * static_cast<double>(i % 32));
      }
    }
  }
  CHECK(*scaler->scale_data() == 1024);
  int32_t number = 1;
  RequireError(scaler->Scale({{&number, 1, DType::kInt32, {}}}), absl::StatusCode::kInvalidArgument, "int32");
}

TEST_CASE("the growth interval's last good step doubles the scale, none before") {
  for (const bool fused : {false, true}) {
    const auto scaler = Make();
    TestOptimizer optimizer(fused);
    for (int i = 0; i < 1999; ++i) StepWith(*scaler, optimizer, 1);
    CHECK(ScaleOf(*scaler) == 65536);
    CHECK(TrackerOf(*scaler) == 1999);
    StepWith(*scaler, optimizer, 1);
    CHECK(ScaleOf(*scaler) == 131072);
    CHECK(TrackerOf(*scaler) == 0);
    CHECK(optimizer.steps_ == 2000);
  }
}

TEST_CASE("an infinity just before growth halves the scale and starts the count anew") {
  for (const bool fused : {false, true}) {
    const auto scaler = Make({.initial_scale = 8, .growth_factor = 4, .backoff_factor = 0.25});
    TestOptimizer optimizer(fused);
    for (int i = 0; i < 1999; ++i) StepWith(*scaler, optimizer, 1);
    const std::vector<float> values = optimizer.values_;
    StepWith(*scaler, optimizer, kInf);
    CHECK(ScaleOf(*scaler) == 2);
    CHECK(TrackerOf(*scaler) == 0);
    CHECK(optimizer.steps_ == 1999);
    CHECK(optimizer.values_ == values);
    for (int i = 0; i < 1999; ++i) StepWith(*scaler, optimizer, 1);
    CHECK(ScaleOf(*scaler) == 2);
    StepWith(*scaler, optimizer, 1);
    CHECK(ScaleOf(*scaler) == 8);
  }
}

TEST_CASE("a scale near the largest float does not become infinite") {
  const auto scaler = Make({.initial_scale = FLT_MAX / 1.5f, .growth_interval = 3});
  TestOptimizer optimizer(true);
  for (int i = 0; i < 3; ++i) StepWith(*scaler, optimizer, 1);
  CHECK(ScaleOf(*scaler) == FLT_MAX / 1.5f);
  CHECK(TrackerOf(*scaler) == 0);
}

TEST_CASE("the scale does not fall below the least") {
  const auto scaler = Make({.initial_scale = 5, .min_scale = 2});
  TestOptimizer optimizer(true);
  StepWith(*scaler, optimizer, kNan);
  CHECK(ScaleOf(*scaler) == 2.5f);
  StepWith(*scaler, optimizer, kNan);
  CHECK(ScaleOf(*scaler) == 2);
  StepWith(*scaler, optimizer, kNan);
  CHECK(ScaleOf(*scaler) == 2);
}

TEST_CASE("with hysteresis the scale backs off at the so many-th bad step since it grew") {
  const auto scaler = Make({.initial_scale = 1024, .growth_interval = 2, .hysteresis = 3});
  TestOptimizer optimizer(true);
  const auto after = [&](float grad) {
    StepWith(*scaler, optimizer, grad);
    return ScaleOf(*scaler);
  };
  CHECK(after(kInf) == 1024);
  CHECK(after(1) == 1024);
  CHECK(TrackerOf(*scaler) == 1);
  CHECK(after(kInf) == 1024);  // a good step alone does not wind it up
  CHECK(TrackerOf(*scaler) == 0);
  CHECK(after(kInf) == 512);
  CHECK(after(kInf) == 256);
  CHECK(after(1) == 256);
  CHECK(after(1) == 512);  // grown: it begins anew
  CHECK(after(kInf) == 512);
  CHECK(after(kInf) == 512);
  CHECK(after(kInf) == 256);
  CHECK(optimizer.steps_ == 3);
}

TEST_CASE("Unscale multiplies every element by the inverse, where there is an infinity too") {
  const auto scaler = Make({.initial_scale = 3});
  const float inverse = static_cast<float>(1 / 3.0);
  ScaleSomething(*scaler);
  for (const float bad : {0.0f, kInf, -kInf, kNan}) {
    for (const size_t at : {0u, 17u, 998u, 1002u}) {
      std::vector<float> grads(1003);
      for (size_t i = 0; i < grads.size(); ++i) grads[i] = static_cast<float>(i) - 500;
      if (bad != 0) grads[at] = bad;
      TestOptimizer optimizer(false, grads, {});
      Require(scaler->Unscale(optimizer));
      for (size_t i = 0; i < grads.size(); ++i) {
        const float expected = grads[i] * inverse;
        REQUIRE((optimizer.grads_[i] == expected || (std::isnan(expected) && std::isnan(optimizer.grads_[i]))));
      }
      const absl::StatusOr<bool> found = scaler->FoundInf(optimizer);
      REQUIRE(found.ok());
      REQUIRE(*found == (bad != 0));
      Require(scaler->Update(3.0f));
    }
  }
}

TEST_CASE("gradients of several types and ranges are unscaled together") {
  const auto scaler = Make({.initial_scale = 4});
  ScaleSomething(*scaler);
  double wide[] = {4, 8};
  float single[] = {12, 16};
  uint16_t brain[2];
  testing::SetElement(DType::kBFloat16, brain, 0, 20);
  testing::SetElement(DType::kBFloat16, brain, 1, 24);
  const std::vector<Buffer> buffers = {{wide, 2, DType::kFloat64, {}},
                                       {nullptr, 0, DType::kFloat32, {}},
                                       {single, 2, DType::kFloat32, {}},
                                       {brain, 2, DType::kBFloat16, {}}};
  TestOptimizer optimizer(false, buffers);
  Require(scaler->Unscale(optimizer));
  CHECK(wide[0] == 1);
  CHECK(wide[1] == 2);
  CHECK(single[0] == 3);
  CHECK(single[1] == 4);
  CHECK(testing::GetElement(DType::kBFloat16, brain, 0) == 5);
  CHECK(testing::GetElement(DType::kBFloat16, brain, 1) == 6);
  CHECK_FALSE(*scaler->FoundInf(optimizer));
  Require(scaler->Update());
  brain[1] = 0x7f80;  // infinity
  Require(scaler->Unscale(optimizer));
  CHECK(*scaler->FoundInf(optimizer));
}

TEST_CASE("of two optimizers the one with an infinity does not step, and the scale backs off") {
  for (const bool fused : {false, true}) {
    const auto scaler = Make();
    TestOptimizer good(fused), bad(fused, {1, kInf, 1});
    for (int round = 0; round < 2; ++round) {
      ScaleSomething(*scaler);
      good.grads_ = {1, 2, 3};
      bad.grads_ = {1, round == 0 ? kInf : 1, 1};
      Require(scaler->Step(good));
      Require(scaler->Step(bad));
      CHECK_FALSE(*scaler->FoundInf(good));
      CHECK(*scaler->FoundInf(bad) == (round == 0));
      Require(scaler->Update());
      CHECK(good.steps_ == round + 1);
      CHECK(bad.steps_ == round);
      CHECK(ScaleOf(*scaler) == 32768);
      CHECK(TrackerOf(*scaler) == round);
    }
  }
}

TEST_CASE("a fused step gives the bits of one that is not") {
  const auto one = Make({.initial_scale = 3, .growth_interval = 2}),
             two = Make({.initial_scale = 3, .growth_interval = 2});
  TestOptimizer plain(false), fused(true);
  for (const float grad : {1.0f, 0.3f, 7.7f, kInf, 1e-30f, 5.0f, kNan, 0.1f, 0.2f, 0.3f, 0.4f}) {
    StepWith(*one, plain, grad);
    StepWith(*two, fused, grad);
    REQUIRE(plain.values_ == fused.values_);
    REQUIRE(*one->State() == *two->State());
  }
  CHECK(plain.steps_ == 9);
  CHECK(ScaleOf(*one) == 12);
}

TEST_CASE("a fused step finds the scale and the finding at the same places every time") {
  const auto scaler = Make();
  TestOptimizer optimizer(true);
  StepWith(*scaler, optimizer, 1);
  const StepOptions first = optimizer.last_;
  REQUIRE(first.inv_scale != nullptr);
  REQUIRE(first.found_inf != nullptr);
  const float* scale = scaler->scale_data();
  StepWith(*scaler, optimizer, kInf);
  StepWith(*scaler, optimizer, 1);
  CHECK(optimizer.last_.inv_scale == first.inv_scale);
  CHECK(optimizer.last_.found_inf == first.found_inf);
  CHECK(scaler->scale_data() == scale);
  CHECK(*first.inv_scale == 1.0f / 32768);
}

TEST_CASE("what was unscaled, to be clipped say, is not unscaled again") {
  for (const bool fused : {false, true}) {
    const auto scaler = Make({.initial_scale = 64});
    TestOptimizer optimizer(fused, {64 * 3, 64 * 4, 0});
    ScaleSomething(*scaler);
    Require(scaler->Unscale(optimizer));
    CHECK(optimizer.grads_ == std::vector<float>{3, 4, 0});
    for (float& g : optimizer.grads_) g /= 5;  // to norm 1
    Require(scaler->Step(optimizer));
    Require(scaler->Update());
    CHECK(optimizer.last_.inv_scale == nullptr);
    CHECK(optimizer.values_ == std::vector<float>{10 - 0.1f * 0.6f, 20 - 0.1f * 0.8f, 30});
    // An infinity that Unscale has seen stops the step, though clipping has made it something else.
    optimizer.grads_ = {kInf, 1, 1};
    Require(scaler->Unscale(optimizer));
    optimizer.grads_ = {0, 0, 0};
    Require(scaler->Step(optimizer));
    CHECK(optimizer.steps_ == 1);
  }
}

TEST_CASE("gradients accumulated over micro-batches are unscaled once") {
  const auto scaler = Make({.initial_scale = 16});
  TestOptimizer optimizer(false, {0, 0, 0});
  for (int micro = 0; micro < 4; ++micro) {
    float loss_grad = 0.25f;
    Require(scaler->Scale({{&loss_grad, 1, DType::kFloat32, {}}}));
    for (float& g : optimizer.grads_) g += loss_grad;
  }
  Require(scaler->Step(optimizer));
  Require(scaler->Update());
  CHECK(optimizer.grads_ == std::vector<float>{1, 1, 1});
  CHECK(optimizer.values_ == std::vector<float>{9.9f, 19.9f, 29.9f});
  CHECK(TrackerOf(*scaler) == 1);
}

TEST_CASE("a loaded scaler goes on as the saved one") {
  const GradScalerOptions options = {
      .initial_scale = 256, .growth_factor = 3, .backoff_factor = 0.3, .growth_interval = 4, .hysteresis = 2};
  const auto saved = Make(options);
  TestOptimizer one(true);
  for (const float grad : {1.0f, kInf, 1.0f, 1.0f, 1.0f}) StepWith(*saved, one, grad);
  const GradScalerState state = *saved->State();
  CHECK(state == GradScalerState{true, 256, 3, 0.3, 4, 3, 1});

  const auto loaded = Make({.hysteresis = 2});
  Require(loaded->Load(state));
  CHECK(*loaded->State() == state);
  TestOptimizer two(true);
  for (const float grad : {kInf, 1.0f, 1.0f, 1.0f, 1.0f, kNan, kNan}) {
    StepWith(*saved, one, grad);
    StepWith(*loaded, two, grad);
    REQUIRE(*saved->State() == *loaded->State());
  }
}

TEST_CASE("a state of torch's with a scale below the least one goes on as in torch") {
  const auto scaler = Make({.growth_interval = 2});
  TestOptimizer optimizer(true);
  Require(scaler->Load({true, 0.25f, 2, 0.5, 2, 0, 0}));
  CHECK(ScaleOf(*scaler) == 0.25f);
  for (const auto& [grad, scale] : std::vector<std::pair<float, float>>{{kInf, 0.125f},
                                                                        {1.0f, 0.125f},
                                                                        {1.0f, 0.25f},
                                                                        {1.0f, 0.25f},
                                                                        {1.0f, 0.5f},
                                                                        {1.0f, 0.5f},
                                                                        {1.0f, 1.0f},
                                                                        {kInf, 1.0f}}) {
    StepWith(*scaler, optimizer, grad);
    REQUIRE(ScaleOf(*scaler) == scale);
  }
  Require(scaler->Load({true, 1e-38f * 1.2f, 2, 0.5, 2, 0, 0}));
  for (int i = 0; i < 3; ++i) StepWith(*scaler, optimizer, kInf);
  CHECK(ScaleOf(*scaler) > 0);
  CHECK(std::isfinite(1 / ScaleOf(*scaler)));
}

// Torch compares for equality.
TEST_CASE("a count of good steps beyond the interval grows nothing until it begins anew") {
  const auto scaler = Make();
  TestOptimizer optimizer(true);
  Require(scaler->Load({true, 8, 2, 0.5, 2, 5, 0}));
  for (int i = 0; i < 3; ++i) StepWith(*scaler, optimizer, 1);
  CHECK(ScaleOf(*scaler) == 8);
  CHECK(TrackerOf(*scaler) == 8);
  StepWith(*scaler, optimizer, kInf);
  CHECK(ScaleOf(*scaler) == 4);
  for (int i = 0; i < 2; ++i) StepWith(*scaler, optimizer, 1);
  CHECK(ScaleOf(*scaler) == 8);
}

TEST_CASE("a program may make new optimizers all the time") {
  const auto scaler = Make();
  const absl::StatusOr<uint32_t*> word = scaler->AddFoundInf();
  REQUIRE(word.ok());
  std::vector<std::unique_ptr<TestOptimizer>> all;
  for (int i = 0; i < 200; ++i) {
    TestOptimizer& optimizer = *all.emplace_back(std::make_unique<TestOptimizer>(true));
    StepWith(*scaler, optimizer, i % 3 == 0 ? kInf : 1.0f);
    REQUIRE(optimizer.steps_ == (i % 3 == 0 ? 0 : 1));
    StepWith(*scaler, *all[0], 1);  // is used all the time
    REQUIRE(all[0]->steps_ == i + 1);
  }
  CHECK(**word == 0);
  // At once there may be 59 and the word.
  ScaleSomething(*scaler);
  for (size_t i = 0; i < 59; ++i) Require(scaler->Step(*all[i]));
  RequireError(scaler->Step(*all[59]), absl::StatusCode::kResourceExhausted, "several scalers");
  Require(scaler->Update());
  ScaleSomething(*scaler);
  Require(scaler->Step(*all[59]));
}

TEST_CASE("a kernel that multiplies by the scale counts as Scale") {
  const auto scaler = Make();
  TestOptimizer optimizer(false);
  for (float& g : optimizer.grads_) g *= *scaler->scale_data();
  Require(scaler->Step(optimizer));
  CHECK(optimizer.grads_ == std::vector<float>{1, 2, 3});
}

TEST_CASE("what the reduction has found counts, and is not looked for again") {
  const auto scaler = Make();
  const absl::StatusOr<uint32_t*> word = scaler->AddFoundInf();
  REQUIRE(word.ok());
  TestOptimizer optimizer(true);
  ScaleSomething(*scaler);
  **word = 1;
  Require(scaler->Step(optimizer, {.found_inf = *word}));
  CHECK(optimizer.steps_ == 0);
  CHECK(*scaler->FoundInf(optimizer));
  Require(scaler->Update());
  CHECK(**word == 0);
  CHECK(ScaleOf(*scaler) == 32768);
  // No pass of its own: an infinity that the reduction has not told of goes unnoticed.
  optimizer.grads_[0] = kInf;
  Require(scaler->Step(optimizer, {.found_inf = *word}));
  CHECK(optimizer.steps_ == 1);
  Require(scaler->Update());
  CHECK(TrackerOf(*scaler) == 1);
  // And without the word it is looked for.
  Require(scaler->Step(optimizer));
  CHECK(optimizer.steps_ == 1);
  Require(scaler->Update());
  CHECK(ScaleOf(*scaler) == 16384);

  uint32_t foreign = 0;
  RequireError(scaler->Step(optimizer, {.found_inf = &foreign}), absl::StatusCode::kInvalidArgument, "AddFoundInf");
  RequireError(scaler->Step(optimizer, {.found_inf = *word + 2}), absl::StatusCode::kInvalidArgument, "AddFoundInf");
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) status = scaler->AddFoundInf().status();
  RequireError(status, absl::StatusCode::kResourceExhausted, "several scalers");
  TestOptimizer late(true);
  RequireError(scaler->Step(late), absl::StatusCode::kResourceExhausted, "several scalers");
}

TEST_CASE("the scale can be set, and the count stays") {
  const auto scaler = Make();
  TestOptimizer optimizer(true);
  for (int i = 0; i < 5; ++i) StepWith(*scaler, optimizer, 1);
  ScaleSomething(*scaler);
  optimizer.grads_[0] = kInf;
  Require(scaler->Step(optimizer));
  Require(scaler->Update(128.0f));
  CHECK(ScaleOf(*scaler) == 128);
  CHECK(TrackerOf(*scaler) == 5);
  StepWith(*scaler, optimizer, 1);  // the infinity is forgotten
  CHECK(*optimizer.last_.inv_scale == 1.0f / 128);
  CHECK(ScaleOf(*scaler) == 128);
  CHECK(TrackerOf(*scaler) == 6);
  for (const float bad : {0.5f, 0.0f, -1.0f, kInf, kNan}) {
    RequireError(scaler->Update(bad), absl::StatusCode::kInvalidArgument, "min_scale");
  }
  CHECK(ScaleOf(*scaler) == 128);
}

}  // namespace ddp
