// SPDX-License-Identifier: Apache-2.0
// The convolutional models as a whole: their parameters, and that they learn.
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/cnn.h"
#include "examples/nn/loss.h"
#include "tests/support/catch.h"
#include "tests/unit/bound_model.h"

namespace {

using nn::ImageShape;

std::vector<float> RandomImages(int count, const ImageShape& s, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> floats(static_cast<size_t>(count * s.channels * s.height * s.width));
  for (float& x : floats) x = uniform(random);
  return floats;
}

TEST_CASE("Models have the parameters of PyTorch's, and the same number of them") {
  const auto names = [](const nn::Model& model) {
    std::map<std::string, std::vector<int64_t>> shapes;
    for (const nn::ParameterSpec& spec : model.parameters()) shapes[spec.name] = spec.shape;
    return shapes;
  };
  const auto count = [](const nn::Model& model) {
    size_t sum = 0;
    for (const nn::ParameterSpec& spec : model.parameters()) sum += spec.count();
    return sum;
  };
  const auto lenet = nn::MakeLenet({1, 28, 28}, 10, 2);
  CHECK(count(*lenet) == 1199882);
  CHECK(names(*lenet).at("2.weight") == std::vector<int64_t>{64, 32, 3, 3});
  CHECK(names(*lenet).at("6.weight") == std::vector<int64_t>{128, 9216});
  CHECK(names(*lenet).size() == 8);
  CHECK(lenet->buffers().empty());

  const auto resnet = nn::MakeResnet20({3, 32, 32}, 10, 2);
  CHECK(count(*resnet) == 269722);
  CHECK(resnet->parameters().size() == 59);
  CHECK(names(*resnet).at("6.conv1.weight") == std::vector<int64_t>{32, 16, 3, 3});
  CHECK(names(*resnet).at("11.bn2.bias") == std::vector<int64_t>{64});
  CHECK(names(*resnet).at("14.weight") == std::vector<int64_t>{10, 64});
  REQUIRE(resnet->buffers().size() == 38);
  CHECK(resnet->buffers()[2].name == "3.bn1.running_mean");

  const auto resnet50 = nn::MakeResnet50({3, 32, 32}, 1000, 1);
  CHECK(count(*resnet50) == 25557032);
  CHECK(resnet50->parameters().size() == 161);
  CHECK(resnet50->buffers().size() == 106);
  CHECK(names(*resnet50).at("0.weight") == std::vector<int64_t>{64, 3, 7, 7});
  CHECK(names(*resnet50).at("4.shortcut.0.weight") == std::vector<int64_t>{256, 64, 1, 1});
  CHECK(names(*resnet50).at("7.body.3.weight") == std::vector<int64_t>{128, 128, 3, 3});
  CHECK(names(*resnet50).at("19.body.7.bias") == std::vector<int64_t>{2048});
  CHECK(names(*resnet50).count("5.shortcut.0.weight") == 0);
  CHECK(names(*resnet50).at("22.weight") == std::vector<int64_t>{1000, 2048});
}

// 4089184256 multiplications of ResNet-50's forward pass are the number that is quoted as its "4.1 GFLOPs".
TEST_CASE("The operations of models: forward, gradients of weights, gradients of inputs but the first layer's") {
  CHECK(nn::MakeMlp(784, {1024}, 10, 1)->flops() == 2 * (2 * 784 * 1024 + 3 * 1024 * 10));
  const int64_t first = 26 * 26 * 32 * 9, second = 24 * 24 * 64 * 32 * 9, linear = 9216 * 128 + 128 * 10;
  CHECK(nn::MakeLenet({1, 28, 28}, 10, 1)->flops() == 2 * (2 * first + 3 * (second + linear)));
  const int64_t stem = 112 * 112 * 64 * 3 * 49;
  CHECK(nn::MakeResnet50({3, 224, 224}, 1000, 1)->flops() == 2 * (3 * int64_t{4089184256} - stem));
}

TEST_CASE("Models learn a handful of images, whatever their size, in batches of two sizes") {
  nn::SetThreads(1);
  for (const bool residual : {false, true}) {
    const ImageShape images = residual ? ImageShape{3, 9, 7} : ImageShape{1, 7, 8};
    nn::testing::BoundModel bound(residual ? nn::MakeResnet20(images, 4, 8) : nn::MakeLenet(images, 4, 8));
    const std::vector<float> x = RandomImages(8, images, 9);
    const std::vector<int32_t> labels = {0, 1, 2, 3, 3, 2, 1, 0};
    for (int step = 0; step < 100; ++step) {
      const int rows = step % 10 == 9 ? 6 : 8;
      bound.Step(x, absl::MakeSpan(labels).first(static_cast<size_t>(rows)));
      for (size_t p = 0; p < bound.values.size(); ++p) {
        for (size_t i = 0; i < bound.values[p].size(); ++i) bound.values[p][i] -= 0.1f * bound.grads[p][i];
      }
    }
    CHECK(nn::CountCorrect(bound.model->Forward(x.data(), 8), labels) == 8);
  }
}

TEST_CASE("The gradient of ResNet-50 is the slope of its loss", "[resnet50]") {
  const ImageShape images = {3, 40, 48};
  nn::SetThreads(1);
  nn::testing::BoundModel bound(nn::MakeResnet50(images, 4, 4));
  const std::vector<float> x = RandomImages(4, images, 9);
  const std::vector<int32_t> labels = {3, 1, 0, 2};
  bound.Step(x, labels);
  double squares = 0;
  for (const std::vector<float>& grad : bound.grads) {
    for (const float g : grad) squares += static_cast<double>(g) * static_cast<double>(g);
  }
  // Along the gradient, so far that the loss changes by about 2 * kChange.
  constexpr double kChange = 0.02;
  const auto step = static_cast<float>(kChange / squares);
  const std::vector<std::vector<float>> grads = bound.grads;
  const auto loss_at = [&](float distance) {
    for (size_t p = 0; p < grads.size(); ++p) {
      for (size_t i = 0; i < grads[p].size(); ++i) bound.values[p][i] += distance * grads[p][i];
    }
    return bound.Step(x, labels);
  };
  const double above = loss_at(step), below = loss_at(-2 * step);
  INFO("the norm of the gradient is " << std::sqrt(squares));
  CHECK((above - below) / (2 * kChange) == ddp::testing::Approx(1).epsilon(0.05));
}

TEST_CASE("ResNet-50 learns two images, and announces its gradients from the last to the first", "[resnet50]") {
  const ImageShape images = {3, 33, 40};
  nn::SetThreads(1);
  nn::testing::BoundModel bound(nn::MakeResnet50(images, 4, 2));
  const std::vector<float> x = RandomImages(2, images, 9);
  const std::vector<int32_t> labels = {3, 1};
  double first = 0, last = 0;
  for (int step = 0; step < 5; ++step) {
    last = bound.Step(x, labels);
    if (step == 0) first = last;
    for (size_t p = 0; p < bound.values.size(); ++p) {
      for (size_t i = 0; i < bound.values[p].size(); ++i) bound.values[p][i] -= 0.01f * bound.grads[p][i];
    }
  }
  CHECK(last < 0.5 * first);
  std::vector<size_t> ready;
  bound.model->Forward(x.data(), 2);
  nn::SoftmaxCrossEntropy(bound.model->Forward(x.data(), 2), labels, bound.model->output_grad());
  bound.model->Backward([&](size_t i) { ready.push_back(i); });
  REQUIRE(ready.size() == 161);
  for (size_t i = 0; i + 1 < ready.size(); ++i) CHECK(ready[i] > ready[i + 1]);
}

}  // namespace
