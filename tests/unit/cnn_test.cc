// SPDX-License-Identifier: Apache-2.0
// The layers of convolutional models: against plain loops in double precision, and their gradients against central
// differences of those.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "ddp/autocast.h"
#include "examples/nn/batch_norm.h"
#include "examples/nn/cnn.h"
#include "examples/nn/conv2d.h"
#include "examples/nn/pooling.h"
#include "examples/nn/residual.h"
#include "tests/support/catch.h"
#include "tests/support/cnn_reference.h"

namespace {

using ddp::testing::Approx;
using nn::Activation;
using nn::ImageShape;
using nn::Layout;
using nn::testing::Convolve;
using nn::testing::Normalize;
using nn::testing::Numbers;
using nn::testing::PoolImages;
using nn::testing::Rectify;
using nn::testing::ShortcutA;

std::vector<float> RandomFloats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> floats(count);
  for (float& x : floats) x = uniform(random);
  return floats;
}

nn::onednn::SessionPtr NewSession() {
  nn::SetThreads(1);
  return std::make_shared<nn::onednn::Session>();
}

Numbers ToDouble(const std::vector<float>& floats) { return {floats.begin(), floats.end()}; }

size_t Count(const ImageShape& s) { return static_cast<size_t>(s.channels * s.height * s.width); }

// --- Layers and what they are compared with.

struct Case {
  nn::onednn::SessionPtr session;
  nn::Layer* layer;
  ImageShape in, out;
  Layout in_layout = Layout::kNative, out_layout = Layout::kNative;
  std::function<Numbers(const Numbers& x, const std::vector<Numbers>& parameters, int rows)> reference;
};

std::vector<float> Reordered(const Case& c, const std::vector<float>& x, const ImageShape& shape, int rows, Layout from,
                             Layout to) {
  std::vector<float> y(static_cast<size_t>(rows) * c.session->Floats(shape, to), NAN);
  nn::onednn::Relayout(c.session, shape, rows, from, to).Run(x.data(), y.data());
  return y;
}

double Dot(const Numbers& y, const std::vector<float>& weights) {
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) sum += y[i] * static_cast<double>(weights[i]);
  return sum;
}

double WorstDifference(const Numbers& expected, const std::vector<float>& actual) {
  REQUIRE(expected.size() == actual.size());
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(expected[i] - static_cast<double>(actual[i]));
    if (!(error <= worst)) worst = error;  // a NaN sticks
  }
  return worst;
}

// The largest difference between `grads` and the slopes of `value` along the numbers of `at`, which it reads: of all of
// them, or some hundred spread over many.
double WorstSlope(Numbers& at, const std::vector<float>& grads, const std::function<double()>& value) {
  constexpr double kStep = 1e-5;
  constexpr size_t kMost = 200;
  REQUIRE(at.size() == grads.size());
  double worst = 0;
  for (size_t i = 0; i < at.size(); i += at.size() / kMost + 1) {
    const double middle = at[i];
    at[i] = middle + kStep;
    const double above = value();
    at[i] = middle - kStep;
    const double error = std::abs((above - value()) / (2 * kStep) - static_cast<double>(grads[i]));
    if (!(error <= worst)) worst = error;  // a NaN sticks
    at[i] = middle;
  }
  return worst;
}

void CheckLayer(const Case& c, int rows, double tolerance = 2e-5) {
  nn::Layer& layer = *c.layer;
  CHECK(layer.input_size() == static_cast<int>(c.session->Floats(c.in, c.in_layout)));
  REQUIRE(layer.output_size() == static_cast<int>(c.session->Floats(c.out, c.out_layout)));
  std::vector<std::vector<float>> values, grads, first_grads;
  std::vector<float*> value_pointers, grad_pointers;
  for (const nn::ParameterSpec& spec : layer.parameters()) {
    values.push_back(RandomFloats(spec.count(), static_cast<uint32_t>(7 + values.size())));
    grads.emplace_back(spec.count(), NAN);
  }
  for (size_t i = 0; i < values.size(); ++i) {
    value_pointers.push_back(values[i].data());
    grad_pointers.push_back(grads[i].data());
  }
  layer.Bind(value_pointers, grad_pointers);

  const auto n = static_cast<size_t>(rows);
  const std::vector<float> plain_x = RandomFloats(n * Count(c.in), 3), plain_dy = RandomFloats(n * Count(c.out), 4);
  const std::vector<float> x = Reordered(c, plain_x, c.in, rows, Layout::kPlain, c.in_layout);
  std::vector<float> y(n * static_cast<size_t>(layer.output_size()), NAN), dx(x.size(), NAN);
  layer.Forward(x.data(), y.data(), rows);

  Numbers at = ToDouble(plain_x);
  std::vector<Numbers> parameters;
  for (const auto& value : values) parameters.push_back(ToDouble(value));
  CHECK(WorstDifference(c.reference(at, parameters, rows), Reordered(c, y, c.out, rows, c.out_layout, Layout::kPlain)) <
        tolerance);

  std::vector<size_t> ready;
  const auto backward = [&](bool accumulate) {
    std::vector<float> dy = Reordered(c, plain_dy, c.out, rows, Layout::kPlain, c.out_layout);
    layer.Backward(x.data(), y.data(), dy.data(), dx.data(), rows, accumulate, [&](size_t i) { ready.push_back(i); });
  };
  backward(false);
  std::sort(ready.begin(), ready.end());
  REQUIRE(ready.size() == values.size());
  for (size_t i = 0; i < ready.size(); ++i) CHECK(ready[i] == i);

  const auto value = [&] { return Dot(c.reference(at, parameters, rows), plain_dy); };
  CHECK(WorstSlope(at, Reordered(c, dx, c.in, rows, c.in_layout, Layout::kPlain), value) < 10 * tolerance);
  for (size_t p = 0; p < parameters.size(); ++p) {
    INFO(layer.parameters()[p].name);
    CHECK(WorstSlope(parameters[p], grads[p], value) < 20 * tolerance);
  }
  first_grads = grads;
  backward(true);
  for (size_t p = 0; p < grads.size(); ++p) {
    Numbers twice = ToDouble(first_grads[p]);
    for (double& g : twice) g *= 2;
    CHECK(WorstDifference(twice, grads[p]) < 20 * tolerance);
  }
}

TEST_CASE("Convolutions: kernels, strides, borders, with and without bias and ReLU") {
  const auto session = NewSession();
  struct Options {
    ImageShape in;
    int outputs, kernel, stride, padding;
    bool bias;
    Activation activation;
    Layout layout;
  };
  for (const Options& o : {Options{{1, 7, 6}, 16, 3, 1, 0, true, Activation::kRelu, Layout::kPlain},
                           Options{{3, 6, 6}, 16, 3, 1, 1, false, Activation::kNone, Layout::kPlain},
                           Options{{16, 5, 4}, 32, 3, 2, 1, false, Activation::kNone, Layout::kNative},
                           Options{{5, 5, 5}, 7, 3, 1, 1, true, Activation::kRelu, Layout::kNative},
                           Options{{4, 6, 5}, 3, 5, 1, 2, true, Activation::kNone, Layout::kNative},
                           Options{{6, 4, 4}, 8, 1, 2, 0, true, Activation::kNone, Layout::kNative}}) {
    INFO(o.in.channels << " to " << o.outputs << " channels, kernel " << o.kernel << ", stride " << o.stride);
    nn::Conv2d layer(session,
                     {.in = o.in,
                      .outputs = o.outputs,
                      .kernel = o.kernel,
                      .stride = o.stride,
                      .padding = o.padding,
                      .bias = o.bias,
                      .activation = o.activation,
                      .in_layout = o.layout},
                     3);
    const auto reference = [&](const Numbers& x, const std::vector<Numbers>& p, int rows) {
      Numbers y = Convolve(x, rows, o.in, p[0], o.bias ? p[1] : Numbers(), o.outputs, o.kernel, o.stride, o.padding);
      return o.activation == Activation::kRelu ? Rectify(y) : y;
    };
    const Case c = {session, &layer, o.in, layer.output_shape(), o.layout, Layout::kNative, reference};
    CheckLayer(c, 3);
    CheckLayer(c, 1);
  }
}

TEST_CASE("A convolution of many channels, where Winograd's algorithm is taken if there is one") {
  const auto session = NewSession();
  const ImageShape in = {32, 6, 6};
  nn::Conv2d layer(session, {.in = in, .outputs = 32, .padding = 1}, 1);
  // Rounded more than the direct one.
  CheckLayer({session, &layer, in, layer.output_shape(), Layout::kNative, Layout::kNative,
              [&](const Numbers& x, const std::vector<Numbers>& p, int rows) {
                return Convolve(x, rows, in, p[0], p[1], 32, 3, 1, 1);
              }},
             1, 2e-4);
}

TEST_CASE("Within autocast convolutions multiply in bfloat16, backward too, where the processor can") {
  if (!nn::HasBfloat16()) return;
  const auto session = NewSession();
  for (const ImageShape& in : {ImageShape{1, 7, 6}, ImageShape{32, 6, 6}}) {
    const Layout layout = in.channels == 1 ? Layout::kPlain : Layout::kNative;
    nn::Conv2d layer(session, {.in = in, .outputs = 16, .padding = 1, .in_layout = layout}, 2);
    const Case c = {session,
                    &layer,
                    in,
                    layer.output_shape(),
                    layout,
                    Layout::kNative,
                    [&](const Numbers& x, const std::vector<Numbers>& p, int rows) {
                      return Convolve(x, rows, in, p[0], p[1], 16, 3, 1, 1);
                    }};
    CheckLayer(c, 2);
    // Products of two numbers below 1 that are rounded to 8 bits each.
    const ddp::Autocast autocast(ddp::Device::Kind::kCpu);
    CheckLayer(c, 2, 0.05);
    std::vector<float> weight(layer.parameters()[0].count(), 1 + 0x1p-10f), bias(16), dweight(weight.size()), dbias(16);
    const std::vector<float*> values = {weight.data(), bias.data()}, grads = {dweight.data(), dbias.data()};
    layer.Bind(values, grads);
    std::vector<float> x(static_cast<size_t>(layer.input_size()), 1.0f), y(static_cast<size_t>(layer.output_size()));
    layer.Forward(x.data(), y.data(), 1);
    CHECK(y[0] == std::round(y[0]));  // the weights have lost their last bits
  }
}

TEST_CASE("In bfloat16 nothing that an earlier convolution has left behind gets into a result") {
  if (!nn::HasBfloat16()) return;
  const ddp::Autocast autocast(ddp::Device::Kind::kCpu);
  const auto session = NewSession();
  const auto leave_nan = [&] {
    nn::Conv2d layer(session, {.in = {64, 12, 12}, .outputs = 64, .padding = 1}, 4);
    std::vector<float> weight(layer.parameters()[0].count(), NAN), bias(64, NAN), dweight(weight.size()), dbias(64);
    const std::vector<float*> values = {weight.data(), bias.data()}, grads = {dweight.data(), dbias.data()};
    layer.Bind(values, grads);
    std::vector<float> x(4 * static_cast<size_t>(layer.input_size()), NAN), y(x), dx(x);
    layer.Forward(x.data(), y.data(), 4);
    layer.Backward(x.data(), y.data(), y.data(), dx.data(), 4, false, [](size_t) {});
  };
  // Images as narrow as a stride, and strides longer than a kernel.
  for (const nn::Conv2dOptions& o :
       {nn::Conv2dOptions{.in = {16, 4, 1}, .outputs = 16, .stride = 2, .padding = 1},
        nn::Conv2dOptions{.in = {16, 3, 2}, .outputs = 16, .kernel = 5, .stride = 3, .padding = 2},
        nn::Conv2dOptions{.in = {64, 11, 9}, .outputs = 48, .kernel = 2, .stride = 3},
        nn::Conv2dOptions{.in = {64, 9, 9}, .outputs = 16, .kernel = 1, .stride = 2}}) {
    INFO("kernel " << o.kernel << ", width " << o.in.width);
    nn::Conv2d layer(session, o, 3);
    leave_nan();
    CheckLayer({session, &layer, o.in, layer.output_shape(), Layout::kNative, Layout::kNative,
                [&](const Numbers& x, const std::vector<Numbers>& p, int rows) {
                  return Convolve(x, rows, o.in, p[0], p[1], o.outputs, o.kernel, o.stride, o.padding);
                }},
               3, 0.05);
  }
}

TEST_CASE("Batch normalisation, with and without ReLU, and its running statistics") {
  const auto session = NewSession();
  for (const int channels : {16, 5}) {
    const ImageShape shape = {channels, 4, 3};
    for (const Activation activation : {Activation::kNone, Activation::kRelu}) {
      nn::BatchNorm2d layer(session, shape, activation, 4);
      const Case c = {session,
                      &layer,
                      shape,
                      shape,
                      Layout::kNative,
                      Layout::kNative,
                      [&](const Numbers& x, const std::vector<Numbers>& p, int rows) {
                        const Numbers y = Normalize(x, rows, shape, p[0], p[1]);
                        return activation == Activation::kRelu ? Rectify(y) : y;
                      }};
      CheckLayer(c, 4, 5e-5);
      CheckLayer(c, 2, 5e-5);
    }
  }

  // One channel: 1 2 3 4 have mean 2.5 and unbiased variance 5/3.
  nn::BatchNorm2d layer(session, {1, 1, 4}, Activation::kNone, 1);
  std::vector<float> weight = {2}, bias = {10}, weight_grad(1), bias_grad(1);
  const std::vector<float*> values = {weight.data(), bias.data()}, grads = {weight_grad.data(), bias_grad.data()};
  layer.Bind(values, grads);
  const auto buffers = layer.buffers();
  REQUIRE(buffers.size() == 2);
  CHECK(buffers[0].name == "running_mean");
  CHECK(buffers[1].name == "running_var");
  const Case c = {session, &layer, {1, 1, 4}, {1, 1, 4}, Layout::kNative, Layout::kNative, nullptr};
  const std::vector<float> x = Reordered(c, {1, 2, 3, 4}, c.in, 1, Layout::kPlain, Layout::kNative);
  std::vector<float> y(x.size());
  layer.Forward(x.data(), y.data(), 1);
  CHECK(buffers[0].data[0] == Approx(0.25));
  CHECK(buffers[1].data[0] == Approx(0.9 + 0.1 * 5 / 3));
  layer.SetTraining(false);
  layer.Forward(x.data(), y.data(), 1);
  const std::vector<float> plain = Reordered(c, y, c.out, 1, Layout::kNative, Layout::kPlain);
  CHECK(plain[3] == Approx((4 - 0.25) / std::sqrt(0.9 + 0.5 / 3 + 1e-5) * 2 + 10));
  CHECK(buffers[0].data[0] == Approx(0.25));  // evaluation leaves them
}

TEST_CASE("Batch normalisation refuses to train on one value per channel, and evaluates it") {
  nn::BatchNorm2d layer(NewSession(), {16, 1, 1}, Activation::kRelu, 2);
  std::vector<float> weight(16, 1), bias(16, 0.5f), grad(16), x(32, 0.0f), y(32, NAN);
  layer.Bind(std::vector<float*>{weight.data(), bias.data()}, std::vector<float*>{grad.data(), grad.data()});
  CHECK_THROWS_AS(layer.Forward(x.data(), y.data(), 1), std::invalid_argument);
  layer.Forward(x.data(), y.data(), 2);
  CHECK(y[16] == 0.5f);
  layer.SetTraining(false);
  layer.Forward(x.data(), y.data(), 1);
  CHECK(y[0] == 0.5f);
}

// Checks pooling with `options` on up to `rows` images against `pooled`.
void CheckPool(const nn::Pool2dOptions& options, int rows,
               const std::function<Numbers(const Numbers& x, int rows)>& pooled) {
  const auto session = NewSession();
  nn::Pool2d layer(session, options, rows);
  const Case c = {session,
                  &layer,
                  options.in,
                  options.out(),
                  Layout::kNative,
                  Layout::kNative,
                  [&](const Numbers& x, const std::vector<Numbers>&, int n) { return pooled(x, n); }};
  CheckLayer(c, rows);
  CheckLayer(c, rows - 1);
}

TEST_CASE("Pooling: the largest and the mean, odd sizes, whole images") {
  for (const ImageShape& in : {ImageShape{16, 6, 4}, ImageShape{3, 7, 5}}) {
    for (const bool max : {true, false}) {
      const nn::PoolKind kind = max ? nn::PoolKind::kMax : nn::PoolKind::kAverage;
      for (const Activation activation : {Activation::kNone, Activation::kRelu}) {
        CheckPool({.kind = kind, .in = in, .activation = activation}, 3, [&](const Numbers& x, int rows) {
          const Numbers y = PoolImages(x, rows, in, 2, 2, max);
          return activation == Activation::kRelu ? Rectify(y) : y;
        });
      }
    }
    const nn::Pool2dOptions whole = {.kind = nn::PoolKind::kAverage, .in = in, .height = in.height, .width = in.width};
    CHECK(whole.out() == ImageShape{in.channels, 1, 1});
    CheckPool(whole, 2,
              [&](const Numbers& x, int rows) { return PoolImages(x, rows, in, in.height, in.width, false); });
  }
}

TEST_CASE("Pooling of windows that overlap and reach over the border") {
  for (const ImageShape& in : {ImageShape{16, 7, 6}, ImageShape{3, 4, 5}, ImageShape{32, 1, 2}}) {
    const nn::Pool2dOptions options = {.in = in, .height = 3, .width = 3, .stride = 2, .padding = 1};
    CHECK(options.out() == ImageShape{in.channels, (in.height + 1) / 2, (in.width + 1) / 2});
    CheckPool(options, 2, [&](const Numbers& x, int rows) { return nn::testing::PoolMax(x, rows, in, 3, 2, 1); });
  }
}

TEST_CASE("Flattening yields PyTorch's order") {
  const auto session = NewSession();
  for (const ImageShape& in : {ImageShape{32, 2, 3}, ImageShape{5, 3, 2}}) {
    nn::Flatten layer(session, in, 3);
    CheckLayer({session, &layer, in, in, Layout::kNative, Layout::kPlain,
                [](const Numbers& x, const std::vector<Numbers>&, int) { return x; }},
               3);
  }
}

TEST_CASE("Residual blocks: with an identity, with a stride, with more channels") {
  const auto session = NewSession();
  struct Options {
    ImageShape in;
    int outputs, stride;
  };
  for (const Options& o : {Options{{4, 4, 4}, 4, 1}, Options{{3, 5, 4}, 6, 2}, Options{{16, 4, 4}, 20, 2}}) {
    nn::BasicBlock layer(session, o.in, o.outputs, o.stride, 2);
    const ImageShape out = layer.output_shape();
    CHECK(out ==
          ImageShape{o.outputs, (o.in.height + o.stride - 1) / o.stride, (o.in.width + o.stride - 1) / o.stride});
    std::vector<std::string> names;
    for (const nn::ParameterSpec& spec : layer.parameters()) names.push_back(spec.name);
    CHECK(names ==
          std::vector<std::string>{"conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight", "bn2.bias"});
    CHECK(layer.buffers()[3].name == "bn2.running_var");
    CheckLayer({session, &layer, o.in, out, Layout::kNative, Layout::kNative,
                [&](const Numbers& x, const std::vector<Numbers>& p, int rows) {
                  Numbers y = Convolve(x, rows, o.in, p[0], {}, o.outputs, 3, o.stride, 1);
                  y = Rectify(Normalize(y, rows, out, p[1], p[2]));
                  y = Normalize(Convolve(y, rows, out, p[3], {}, o.outputs, 3, 1, 1), rows, out, p[4], p[5]);
                  const Numbers shortcut = ShortcutA(x, rows, o.in, out, o.stride);
                  for (size_t i = 0; i < y.size(); ++i) y[i] += shortcut[i];
                  return Rectify(y);
                }},
               2, 2e-4);
  }
}

TEST_CASE("Bottlenecks: with an identity, with a projection, with a stride, with padding between channels") {
  const auto session = NewSession();
  struct Options {
    ImageShape in;
    int width, stride;
  };
  for (const Options& o : {Options{{16, 4, 3}, 4, 1}, Options{{8, 4, 4}, 4, 1}, Options{{6, 5, 4}, 3, 2},
                           Options{{64, 3, 3}, 16, 1}, Options{{16, 4, 4}, 16, 2}}) {
    INFO(o.in.channels << " channels, width " << o.width << ", stride " << o.stride);
    const nn::BottleneckOptions options = {.in = o.in, .width = o.width, .stride = o.stride};
    nn::Bottleneck layer(session, options, 3);
    const ImageShape out = options.out(), narrow = {o.width, out.height, out.width};
    CHECK(out ==
          ImageShape{4 * o.width, (o.in.height + o.stride - 1) / o.stride, (o.in.width + o.stride - 1) / o.stride});
    std::vector<std::string> names;
    for (const nn::ParameterSpec& spec : layer.parameters()) names.push_back(spec.name);
    std::vector<std::string> expected = {"body.0.weight", "body.1.weight", "body.1.bias",
                                         "body.3.weight", "body.4.weight", "body.4.bias",
                                         "body.6.weight", "body.7.weight", "body.7.bias"};
    const bool projected = options.projected();
    CHECK(projected == (o.stride == 2 || o.in.channels == 8));
    if (projected) expected.insert(expected.end(), {"shortcut.0.weight", "shortcut.1.weight", "shortcut.1.bias"});
    CHECK(names == expected);
    CHECK(layer.buffers().size() == (projected ? 8 : 6));
    const auto reference = [&](const Numbers& x, const std::vector<Numbers>& p, int rows) {
      const ImageShape before = {o.width, o.in.height, o.in.width};
      Numbers y = Rectify(Normalize(Convolve(x, rows, o.in, p[0], {}, o.width, 1, 1, 0), rows, before, p[1], p[2]));
      y = Rectify(Normalize(Convolve(y, rows, before, p[3], {}, o.width, 3, o.stride, 1), rows, narrow, p[4], p[5]));
      y = Normalize(Convolve(y, rows, narrow, p[6], {}, out.channels, 1, 1, 0), rows, out, p[7], p[8]);
      const Numbers shortcut = projected ? Normalize(Convolve(x, rows, o.in, p[9], {}, out.channels, 1, o.stride, 0),
                                                     rows, out, p[10], p[11])
                                         : x;
      for (size_t i = 0; i < y.size(); ++i) y[i] += shortcut[i];
      return Rectify(y);
    };
    const Case c = {session, &layer, o.in, out, Layout::kNative, Layout::kNative, reference};
    CheckLayer(c, 3, 3e-4);
    CheckLayer(c, 2, 3e-4);
  }
}

TEST_CASE("Dropout drops its share, keeps the mean, and drops the same in backward") {
  nn::Dropout layer(1000, 0.25, 5);
  const std::vector<float> x(20000, 3.0f);
  std::vector<float> y(20000, NAN), again(20000), dx(20000), dy(20000, 1.0f);
  layer.Forward(x.data(), y.data(), 20);
  CHECK(std::count(y.begin(), y.end(), 0.0f) == Approx(5000).epsilon(0.05));
  CHECK(std::count(y.begin(), y.end(), 4.0f) == 20000 - std::count(y.begin(), y.end(), 0.0f));
  layer.Backward(x.data(), y.data(), dy.data(), dx.data(), 20, false, [](size_t) {});
  for (size_t i = 0; i < dx.size(); ++i) CHECK(dx[i] == y[i] / 3);
  layer.Forward(x.data(), again.data(), 20);
  CHECK(again != y);
  nn::Dropout same(1000, 0.25, 5), other(1000, 0.25, 6);
  same.Forward(x.data(), again.data(), 20);
  CHECK(again == y);
  other.Forward(x.data(), again.data(), 20);
  CHECK(again != y);
  layer.SetTraining(false);
  layer.Forward(x.data(), y.data(), 20);
  CHECK(y == x);
}

}  // namespace
