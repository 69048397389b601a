// SPDX-License-Identifier: Apache-2.0
// The element-wise passes and the max pooling of the CPU layers, against plain loops.
#include "examples/nn/kernels.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "hwy/targets.h"
#include "tests/support/catch.h"

namespace {

std::vector<float> RandomFloats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> floats(count);
  for (float& x : floats) x = uniform(random);
  return floats;
}

// Any NaN is the same as any other.
bool Same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

TEST_CASE("Element-wise passes, for every length to the end of two vectors and more") {
  for (size_t count = 1; count < 70; ++count) {
    std::vector<float> x = RandomFloats(count, 1), y = RandomFloats(count, 2);
    x[count / 2] = NAN;
    y[count / 3] = NAN;
    std::vector<float> relu = y, sum = y, relu_sum = y, masked = x;
    nn::Relu(relu.data(), count);
    nn::Add(x.data(), sum.data(), count);
    nn::AddRelu(x.data(), relu_sum.data(), count);
    nn::MaskPositive(y.data(), masked.data(), count);
    size_t wrong = 0;
    for (size_t i = 0; i < count; ++i) {
      wrong += !Same(relu[i], y[i] < 0 ? 0 : y[i]);
      wrong += !Same(sum[i], x[i] + y[i]);
      wrong += !Same(relu_sum[i], x[i] + y[i] < 0 ? 0 : x[i] + y[i]);
      wrong += !Same(masked[i], y[i] <= 0 ? 0 : x[i]);
    }
    CHECK(wrong == 0);
  }
}

// One number of each window, by plain loops: the first of equals, or a NaN.
struct Chosen {
  float value;
  size_t at;  // in x
};
std::vector<Chosen> ChooseByHand(const nn::Windows& w, const std::vector<float>& x) {
  std::vector<Chosen> all;
  for (size_t plane = 0; plane < w.planes; ++plane) {
    for (size_t line = 0; line < w.lines(); ++line) {
      for (size_t column = 0; column < w.columns(); ++column) {
        for (size_t j = 0; j < w.block; ++j) {
          Chosen best = {-INFINITY, x.size()};
          for (size_t k = 0; k < w.height * w.width; ++k) {
            const size_t h = line * w.step(w.height) + k / w.width - w.padding;  // wraps around outside
            const size_t v = column * w.step(w.width) + k % w.width - w.padding;
            if (h >= w.in_height || v >= w.in_width) continue;
            const size_t at = ((plane * w.in_height + h) * w.in_width + v) * w.block + j;
            if (best.at == x.size() || x[at] > best.value || std::isnan(x[at])) best = {x[at], at};
          }
          all.push_back(best);
        }
      }
    }
  }
  return all;
}

TEST_CASE("The largest of each window and its gradient, for every layout, on every instruction set") {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    for (const size_t block : {16, 8, 1, 24}) {
      for (const auto& [height, width, stride, padding] : {std::array<size_t, 4>{2, 2, 0, 0},
                                                           {3, 2, 0, 0},
                                                           {5, 7, 0, 0},
                                                           {3, 3, 2, 1},
                                                           {2, 2, 1, 0},
                                                           {3, 2, 1, 1},
                                                           {4, 4, 2, 2},
                                                           {2, 2, 3, 0},
                                                           {2, 2, 2, 1}}) {
        for (const bool relu : {false, true}) {
          INFO(hwy::TargetName(target) << ", block " << block << ", windows of " << height << " x " << width
                                       << ", stride " << stride << ", padding " << padding);
          const nn::Windows w = {3, 5, 7, height, width, block, stride, padding};
          std::vector<float> x = RandomFloats(3 * 5 * 7 * block, 1);
          for (float& v : x) v = std::round(v * 4);  // many equals
          x[0] = x[7 * block + 1] = NAN;
          x[x.size() / 2] = -INFINITY;
          x[x.size() / 2 + 1] = INFINITY;
          const std::vector<Chosen> want = ChooseByHand(w, x);
          std::vector<float> y(want.size(), 9), dy = RandomFloats(want.size(), 2), dx(x.size(), 9), want_dx(x.size());
          std::vector<int32_t> which(want.size());
          nn::MaxPool(w, relu, x.data(), y.data(), which.data());
          nn::MaxPoolBackward(w, relu, y.data(), which.data(), dy.data(), dx.data());
          size_t wrong = 0;
          for (size_t i = 0; i < want.size(); ++i) {
            wrong += !Same(y[i], relu && want[i].value < 0 ? 0 : want[i].value);
            if (!relu || !(want[i].value <= 0)) want_dx[want[i].at] += dy[i];
          }
          CHECK(wrong == 0);
          CHECK(dx == want_dx);
        }
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace
