// SPDX-License-Identifier: Apache-2.0
// The example layers: against hand-computed values, against a plain model in double precision and its finite
// differences, and the optimizers against their formulas.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/kernels.h"
#include "examples/nn/linear.h"
#include "examples/nn/loss.h"
#include "examples/nn/model.h"
#include "examples/nn/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/targets.h"
#include "tests/unit/bound_model.h"

namespace {

using ddp::testing::Approx;
using ddp::testing::ForEachTarget;
using nn::testing::BoundModel;

std::vector<float> RandomFloats(size_t count, uint32_t seed, float range = 1) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-range, range);
  std::vector<float> floats(count);
  for (float& x : floats) x = uniform(random);
  return floats;
}

std::vector<int32_t> RandomLabels(size_t count, uint32_t classes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> labels(count);
  for (int32_t& label : labels) label = static_cast<int32_t>(random() % classes);
  return labels;
}

// The mean loss of an MLP, by the plainest loops, in double precision.
double ReferenceLoss(const std::vector<nn::ParameterSpec>& specs, const std::vector<std::vector<double>>& values,
                     absl::Span<const float> x, absl::Span<const int32_t> labels) {
  const size_t inputs = x.size() / labels.size();
  double loss = 0;
  for (size_t row = 0; row < labels.size(); ++row) {
    std::vector<double> activation(x.begin() + static_cast<std::ptrdiff_t>(row * inputs),
                                   x.begin() + static_cast<std::ptrdiff_t>((row + 1) * inputs));
    for (size_t p = 0; p < specs.size(); p += 2) {
      std::vector<double> next = values[p + 1];
      for (size_t o = 0; o < next.size(); ++o) {
        for (size_t i = 0; i < activation.size(); ++i) next[o] += values[p][o * activation.size() + i] * activation[i];
        if (p + 2 < specs.size()) next[o] = std::max(next[o], 0.0);
      }
      activation = next;
    }
    double sum = 0;
    for (const double logit : activation) sum += std::exp(logit);
    loss += std::log(sum) - activation[static_cast<size_t>(labels[row])];
  }
  return loss / static_cast<double>(labels.size());
}

// The largest difference between the model's gradients and the central differences of the reference, over all
// parameters.
double WorstGradientError(const BoundModel& bound, absl::Span<const float> x, absl::Span<const int32_t> labels) {
  constexpr double kStep = 1e-6;
  std::vector<std::vector<double>> values;
  for (const auto& value : bound.values) values.emplace_back(value.begin(), value.end());
  double worst = 0;
  for (size_t p = 0; p < values.size(); ++p) {
    for (size_t i = 0; i < values[p].size(); ++i) {
      const double at = values[p][i];
      values[p][i] = at + kStep;
      const double above = ReferenceLoss(bound.model->parameters(), values, x, labels);
      values[p][i] = at - kStep;
      const double below = ReferenceLoss(bound.model->parameters(), values, x, labels);
      values[p][i] = at;
      const double error = std::abs((above - below) / (2 * kStep) - static_cast<double>(bound.grads[p][i]));
      if (!(error <= worst)) worst = error;  // a NaN sticks
    }
  }
  return worst;
}

// Whether `body` ends its process by abort.
bool Aborts(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
    body();
    _exit(0);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

TEST_CASE("An MLP has the parameter names and shapes of PyTorch's nn.Sequential") {
  const auto model = nn::MakeMlp(784, {1024, 512}, 10, 4);
  std::vector<std::string> names;
  for (const nn::ParameterSpec& spec : model->parameters()) names.push_back(spec.name);
  CHECK(names == std::vector<std::string>{"1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias"});
  CHECK(model->parameters()[2].shape == std::vector<int64_t>{512, 1024});
  CHECK(model->parameters()[2].count() == 512 * 1024);
  CHECK(model->parameters()[3].shape == std::vector<int64_t>{512});
  CHECK(model->parameters()[3].fan_in == 1024);
  CHECK(model->input_size() == 784);
  CHECK(model->output_size() == 10);

  const auto single = nn::MakeMlp(5, {}, 3, 4);
  REQUIRE(single->parameters().size() == 2);
  CHECK(single->parameters()[0].name == "1.weight");
}

TEST_CASE("A linear layer with ReLU, by hand") {
  nn::SetThreads(1);
  nn::Linear layer(2, 3, nn::Activation::kRelu, 2);
  std::vector<float> weight = {1, 2, 3, 4, -5, 6}, bias = {0.5, -20, 1}, weight_grad(6, NAN), bias_grad(3, NAN);
  const std::vector<float*> values = {weight.data(), bias.data()}, grads = {weight_grad.data(), bias_grad.data()};
  layer.Bind(values, grads);

  const std::vector<float> x = {1, 2, 3, -1};
  std::vector<float> y(6, NAN), dx(4, NAN), dy = {1, 10, 100, 1000, 10000, 100000};
  layer.Forward(x.data(), y.data(), 2);
  CHECK(y == std::vector<float>{5.5, 0, 8, 1.5, 0, 0});

  std::vector<size_t> ready;
  layer.Backward(x.data(), y.data(), dy.data(), dx.data(), 2, false, [&](size_t i) { ready.push_back(i); });
  CHECK(ready == std::vector<size_t>{1, 0});
  CHECK(bias_grad == std::vector<float>{1001, 0, 100});
  CHECK(weight_grad == std::vector<float>{1 + 3000, 2 - 1000, 0, 0, 100, 200});
  CHECK(dx == std::vector<float>{1 - 500, 2 + 600, 1000, 2000});
}

TEST_CASE("Loss and gradients agree with finite differences, for full and smaller batches") {
  constexpr size_t kBatch = 19;
  BoundModel bound(13, {21, 17}, 5, kBatch);
  const std::vector<float> x = RandomFloats(kBatch * 13, 2);
  const std::vector<int32_t> labels = RandomLabels(kBatch, 5, 3);
  for (const size_t rows : {size_t{kBatch}, size_t{6}, size_t{1}, size_t{kBatch}}) {
    INFO(rows << " rows");
    const auto some = absl::MakeSpan(x).first(rows * 13);
    const auto their_labels = absl::MakeSpan(labels).first(rows);
    std::vector<std::vector<double>> values;
    for (const auto& value : bound.values) values.emplace_back(value.begin(), value.end());
    CHECK(bound.Step(some, their_labels) ==
          Approx(ReferenceLoss(bound.model->parameters(), values, some, their_labels)).epsilon(1e-6));
    CHECK(WorstGradientError(bound, some, their_labels) < 2e-7);
  }
}

TEST_CASE("Each gradient is announced once, last layer first, and complete") {
  BoundModel bound(8, {9, 10}, 4, 7);
  const std::vector<float> x = RandomFloats(7 * 8, 4);
  const std::vector<int32_t> labels = RandomLabels(7, 4, 5);
  nn::SoftmaxCrossEntropy(bound.model->Forward(x.data(), 7), labels, bound.model->output_grad());
  std::vector<size_t> order;
  std::vector<std::vector<float>> announced(bound.grads.size());
  bound.model->Backward([&](size_t i) {
    order.push_back(i);
    announced[i] = bound.grads[i];
  });
  CHECK(order == std::vector<size_t>{5, 4, 3, 2, 1, 0});
  for (size_t i = 0; i < announced.size(); ++i) CHECK(announced[i] == bound.grads[i]);
}

TEST_CASE("Accumulated gradients are sums over backward passes") {
  BoundModel bound(8, {9}, 4, 6);
  const std::vector<float> x = RandomFloats(6 * 8, 6), z = RandomFloats(4 * 8, 7);
  const std::vector<int32_t> x_labels = RandomLabels(6, 4, 8), z_labels = RandomLabels(4, 4, 9);
  bound.Step(x, x_labels);
  const auto of_x = bound.grads;
  bound.Step(z, z_labels);
  const auto of_z = bound.grads;
  bound.Step(x, x_labels);
  bound.Step(z, z_labels, /*accumulate=*/true);
  for (size_t p = 0; p < of_x.size(); ++p) {
    for (size_t i = 0; i < of_x[p].size(); ++i) {
      CHECK(bound.grads[p][i] == Approx(of_x[p][i] + of_z[p][i]).margin(1e-7));
    }
  }
}

TEST_CASE("Initial values are uniform within the fan-in's bound and depend on the seed alone") {
  const BoundModel one(784, {256}, 10, 1, 42), other_batch(784, {256}, 10, 64, 42), other_seed(784, {256}, 10, 1, 43);
  CHECK(one.values == other_batch.values);
  CHECK(one.values[0] != other_seed.values[0]);
  const BoundModel high_seed(784, {256}, 10, 1, 42 + (uint64_t{1} << 32));
  CHECK(one.values[0] != high_seed.values[0]);
  const double bound = 1 / std::sqrt(784.0);
  double sum = 0, squares = 0, largest = 0;
  for (const float value : one.values[0]) {
    sum += value;
    squares += static_cast<double>(value) * value;
    largest = std::max(largest, std::abs(static_cast<double>(value)));
  }
  const auto count = static_cast<double>(one.values[0].size());
  CHECK(largest <= bound);
  CHECK(largest > 0.999 * bound);
  CHECK(std::abs(sum / count) < 0.01 * bound);
  CHECK(squares / count == Approx(bound * bound / 3).epsilon(0.01));
}

TEST_CASE("Softmax cross-entropy, by hand and by finite differences") {
  std::vector<float> dlogits(6, NAN);
  // softmax(0, ln 3) = 1/4, 3/4.
  const std::vector<float> simple = {0, std::log(3.0f), 7, 7};
  std::vector<float> simple_grad(4, NAN);
  const double loss = nn::SoftmaxCrossEntropy(simple, {1, 0}, absl::MakeSpan(simple_grad));
  CHECK(loss == Approx((std::log(4.0 / 3) + std::log(2.0)) / 2).epsilon(1e-6));
  const std::vector<double> expected = {0.125, -0.125, -0.25, 0.25};
  for (size_t i = 0; i < 4; ++i) CHECK(simple_grad[i] == Approx(expected[i]).margin(1e-7));

  std::vector<float> logits = {0.5f, -1.25f, 2, 0.25f, 3, -0.5f};
  nn::SoftmaxCrossEntropy(logits, {2, 0}, absl::MakeSpan(dlogits));
  const std::vector<float> slopes = dlogits;
  for (size_t i = 0; i < logits.size(); ++i) {
    std::vector<float> moved = logits;
    moved[i] = logits[i] + 0.0078125f;
    const double above = nn::SoftmaxCrossEntropy(moved, {2, 0}, absl::MakeSpan(dlogits));
    moved[i] = logits[i] - 0.0078125f;
    const double below = nn::SoftmaxCrossEntropy(moved, {2, 0}, absl::MakeSpan(dlogits));
    CHECK(slopes[i] == Approx((above - below) / 0.015625).margin(5e-5));
  }
}

TEST_CASE("Softmax cross-entropy with smoothed labels, a scale, and both") {
  // -sum target log softmax, with softmax 1/4, 3/4 and targets 0.9, 0.1.
  const std::vector<float> logits = {0, std::log(3.0f)};
  std::vector<float> grad(2, NAN);
  const double loss = nn::SoftmaxCrossEntropy(logits, {0}, absl::MakeSpan(grad), {.label_smoothing = 0.2f});
  CHECK(loss == Approx(0.9 * std::log(4.0) + 0.1 * std::log(4.0 / 3)).epsilon(1e-6));
  CHECK(grad[0] == Approx(0.25 - 0.9).epsilon(1e-6));
  CHECK(grad[1] == Approx(0.75 - 0.1).epsilon(1e-6));
  const double scaled = nn::SoftmaxCrossEntropy(logits, {0}, absl::MakeSpan(grad), {0.2f, 0.5f});
  CHECK(scaled == loss);
  CHECK(grad[0] == Approx((0.25 - 0.9) / 2).epsilon(1e-6));
  CHECK(grad[1] == Approx((0.75 - 0.1) / 2).epsilon(1e-6));
}

TEST_CASE("Softmax cross-entropy stays finite for extreme logits") {
  std::vector<float> dlogits(3, NAN);
  CHECK(nn::SoftmaxCrossEntropy({1000, -1000, 0}, {1}, absl::MakeSpan(dlogits)) == 2000.0);
  CHECK(dlogits == std::vector<float>{1, -1, 0});
  CHECK(nn::SoftmaxCrossEntropy({1000, -1000, 0}, {0}, absl::MakeSpan(dlogits)) == 0.0);
  CHECK(dlogits == std::vector<float>{0, 0, 0});
  CHECK(nn::SoftmaxCrossEntropy({-1e4f, -1e4f, -1e4f}, {2}, absl::MakeSpan(dlogits)) == Approx(std::log(3.0)));
  const double widest = nn::SoftmaxCrossEntropy({FLT_MAX, -FLT_MAX, 0}, {1}, absl::MakeSpan(dlogits));
  CHECK(widest == 2 * static_cast<double>(FLT_MAX));
  CHECK(dlogits == std::vector<float>{1, -1, 0});
}

TEST_CASE("Correct answers are counted, ties going to the first class") {
  CHECK(nn::CountCorrect({1, 2, 0, /**/ 5, 5, 5, /**/ -1, -3, -2}, {1, 0, 0}) == 3);
  CHECK(nn::CountCorrect({1, 2, 0, /**/ 5, 5, 5, /**/ -1, -3, -2}, {0, 1, 2}) == 0);
  CHECK(nn::CountCorrect({}, {}) == 0);
}

TEST_CASE("Column sums and masks are right for every width, on every instruction set") {
  ForEachTarget([] {
    for (const size_t rows : {1, 2, 3, 4, 5, 8, 9}) {
      for (const size_t width : {1, 3, 4, 7, 8, 10, 15, 16, 17, 33, 64}) {
        std::vector<float> y = RandomFloats(rows * width, 10), dy = RandomFloats(rows * width, 11);
        y[rows * width / 2] = NAN;  // its gradient counts, as in PyTorch
        std::vector<float> sums(width, 0.5f), masked = dy, masked_sums(width, -0.5f);
        nn::SumRows(dy.data(), rows, width, sums.data());
        nn::MaskAndSumRows(y.data(), masked.data(), rows, width, masked_sums.data());
        size_t wrong = 0;
        for (size_t j = 0; j < width; ++j) {
          double sum = 0.5, masked_sum = -0.5;
          for (size_t at = j; at < rows * width; at += width) {
            const float kept = y[at] <= 0 ? 0 : dy[at];
            wrong += masked[at] != kept;
            sum += dy[at];
            masked_sum += kept;
          }
          wrong += std::abs(sum - sums[j]) > 1e-6;
          wrong += std::abs(masked_sum - masked_sums[j]) > 1e-6;
        }
        CHECK(wrong == 0);
      }
    }
  });
}

// Eight steps over 1,003 values that begin at an odd address, with fresh gradients each, against `formula`(step, i,
// grad, value) in double precision.
void CheckOptimizer(nn::Optimizer& optimizer, const std::function<void(int, size_t, double, double&)>& formula) {
  constexpr size_t kCount = 1003;
  std::vector<float> memory = RandomFloats(kCount + 1, 12);
  const absl::Span<float> values = absl::MakeSpan(memory).subspan(1);
  std::vector<double> expected(values.begin(), values.end());
  for (int step = 1; step <= 8; ++step) {
    const std::vector<float> grads = RandomFloats(kCount, static_cast<uint32_t>(20 + step));
    optimizer.Step(values, grads);
    double worst = 0;
    for (size_t i = 0; i < kCount; ++i) {
      formula(step, i, grads[i], expected[i]);
      worst = std::max(worst, std::abs(expected[i] - values[i]));
    }
    INFO("step " << step);
    CHECK(worst < 1e-6);
    CHECK(optimizer.steps() == step);
  }
}

TEST_CASE("SGD follows its formula") {
  ForEachTarget([] {
    nn::Sgd plain(1003, {.lr = 0.1});
    CheckOptimizer(plain, [](int, size_t, double grad, double& value) { value -= 0.1 * grad; });
    CHECK(plain.state().empty());

    nn::Sgd full(1003, {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01});
    std::vector<double> m(1003);
    CheckOptimizer(full, [&](int step, size_t i, double grad, double& value) {
      const double g = grad + 0.01 * value;
      m[i] = step == 1 ? g : 0.9 * m[i] + g;
      value -= 0.05 * m[i];
    });
  });
}

TEST_CASE("Adam follows its formula") {
  ForEachTarget([] {
    nn::Adam adam(1003, {.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.02});
    std::vector<double> m(1003), v(1003);
    CheckOptimizer(adam, [&](int step, size_t i, double grad, double& value) {
      const double g = grad + 0.02 * value;
      m[i] = 0.8 * m[i] + 0.2 * g;
      v[i] = 0.95 * v[i] + 0.05 * g * g;
      const double m_hat = m[i] / (1 - std::pow(0.8, step)), v_hat = v[i] / (1 - std::pow(0.95, step));
      value -= 0.01 * m_hat / (std::sqrt(v_hat) + 1e-6);
    });
  });
}

TEST_CASE("AdamW takes weight decay off the value, apart from the gradient") {
  ForEachTarget([] {
    nn::Adam adamw(1003, {.lr = 0.01, .weight_decay = 0.3, .decoupled = true});
    std::vector<double> m(1003), v(1003);
    CheckOptimizer(adamw, [&](int step, size_t i, double grad, double& value) {
      value *= 1 - 0.01 * 0.3;
      m[i] = 0.9 * m[i] + 0.1 * grad;
      v[i] = 0.999 * v[i] + 0.001 * grad * grad;
      value -= 0.01 * m[i] / (1 - std::pow(0.9, step)) / (std::sqrt(v[i] / (1 - std::pow(0.999, step))) + 1e-8);
    });
  });
}

TEST_CASE("Gradients above a norm are scaled down as they are read; below it, or not finite, they are as they were") {
  ForEachTarget([] {
    for (const size_t count : {size_t{1}, size_t{15}, size_t{16}, size_t{1003}}) {
      std::vector<float> grads = RandomFloats(count, 32);
      double squares = 0;
      for (const float g : grads) squares += static_cast<double>(g) * static_cast<double>(g);
      CHECK(nn::SumSquares(grads.data(), count) == Approx(squares).epsilon(1e-12));
      const double norm = std::sqrt(squares);
      const auto moved = [&](double clip_norm, float grad_scale, double factor) {
        std::vector<float> values(count), scaled = grads;
        for (float& g : scaled) g *= static_cast<float>(factor);
        nn::Sgd optimizer(count, {.lr = 1});
        optimizer.set_clip_norm(clip_norm);
        optimizer.set_grad_scale(grad_scale);
        optimizer.Step(absl::MakeSpan(values), scaled);
        return values;
      };
      const std::vector<float> plain = moved(0, 1, 1), clipped = moved(norm / 4, 1, 1),
                               unscaled = moved(norm / 4, 2, 0.5);
      CHECK(moved(norm * 1.01, 1, 1) == plain);
      for (size_t i = 0; i < count; ++i) {
        REQUIRE(clipped[i] == Approx(plain[i] / 4).epsilon(1e-5));
        REQUIRE(unscaled[i] == Approx(clipped[i]).epsilon(1e-6));
      }
      nn::Adam adam(count, {.lr = 1}), other(count, {.lr = 1});
      adam.set_clip_norm(norm / 4);
      std::vector<float> values(count), quarter = grads;
      for (float& g : quarter) g /= 4;
      adam.Step(absl::MakeSpan(values), grads);
      other.Step(absl::MakeSpan(values), quarter);
      for (size_t i = 0; i < count; ++i) {
        REQUIRE(adam.state()[0].data[i] == Approx(other.state()[0].data[i]).epsilon(1e-5));
      }
      grads[count / 2] = INFINITY;
      const std::vector<float> infinite = moved(0.1, 1, 1);
      for (size_t i = 0; i < count; ++i) REQUIRE(infinite[i] == -grads[i]);
    }
  });
}

TEST_CASE("An optimizer restored from its state goes on with the same bits, and leaves padding zero") {
  const auto restored_equals = [](nn::Optimizer& optimizer, nn::Optimizer& fresh, size_t states) {
    std::vector<float> values = RandomFloats(77, 30), grads = RandomFloats(77, 31);
    values[70] = grads[70] = 0;
    for (int i = 0; i < 3; ++i) optimizer.Step(absl::MakeSpan(values), grads);
    std::vector<float> copy = values;
    REQUIRE(optimizer.state().size() == states);
    for (size_t i = 0; i < states; ++i) {
      REQUIRE(fresh.state()[i].name == optimizer.state()[i].name);
      const absl::Span<float> from = optimizer.state()[i].data;
      std::copy(from.begin(), from.end(), fresh.state()[i].data.begin());
    }
    fresh.set_steps(optimizer.steps());
    optimizer.Step(absl::MakeSpan(values), grads);
    fresh.Step(absl::MakeSpan(copy), grads);
    CHECK(copy == values);
    CHECK(values[70] == 0);
  };
  nn::Sgd sgd(77, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1}),
      sgd_fresh(77, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1});
  restored_equals(sgd, sgd_fresh, 1);
  nn::Adam adam(77, {}), adam_fresh(77, {});
  restored_equals(adam, adam_fresh, 2);
}

TEST_CASE("A model learns exclusive or") {
  BoundModel bound(2, {8}, 2, 4);
  const std::vector<float> x = {0, 0, 0, 1, 1, 0, 1, 1};
  const std::vector<int32_t> labels = {0, 1, 1, 0};
  std::vector<nn::Adam> optimizers;
  for (const auto& value : bound.values) optimizers.emplace_back(value.size(), nn::AdamOptions{.lr = 0.05});
  CHECK(bound.Step(x, labels) > 0.5);
  for (int step = 0; step < 300; ++step) {
    bound.Step(x, labels);
    for (size_t p = 0; p < optimizers.size(); ++p) optimizers[p].Step(absl::MakeSpan(bound.values[p]), bound.grads[p]);
  }
  CHECK(bound.Step(x, labels) < 0.01);
  CHECK(nn::CountCorrect(bound.model->Forward(x.data(), 4), labels) == 4);
}

TEST_CASE("A broken contract ends the program") {
  BoundModel bound(3, {}, 2, 4);
  const std::vector<float> x(5 * 3);
  CHECK(Aborts([&] { bound.model->Forward(x.data(), 5); }));
  CHECK(Aborts([&] { bound.model->Forward(x.data(), 0); }));
  CHECK(Aborts([&] { bound.model->Bind({}, {}); }));
  CHECK(Aborts([] { nn::MakeMlp(3, {-1}, 2, 4); }));
  CHECK(Aborts([] { nn::SetThreads(0); }));
  std::vector<float> dlogits(2);
  CHECK(Aborts([&] { nn::SoftmaxCrossEntropy({1, 2}, {2}, absl::MakeSpan(dlogits)); }));
  CHECK(Aborts([&] { nn::SoftmaxCrossEntropy({1, 2}, {-1}, absl::MakeSpan(dlogits)); }));
  nn::Sgd sgd(3, {});
  CHECK(Aborts([&] { sgd.Step(absl::MakeSpan(dlogits), dlogits); }));
}

}  // namespace
