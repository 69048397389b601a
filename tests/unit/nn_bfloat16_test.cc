// SPDX-License-Identifier: Apache-2.0
// Linear layers in bfloat16 on the CPU: against products, in double precision, of the rounded factors.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "ddp/autocast.h"
#include "examples/nn/cnn.h"
#include "examples/nn/device.h"
#include "examples/nn/linear.h"
#include "examples/nn/loss.h"
#include "examples/nn/model.h"
#include "tests/support/catch.h"
#include "tests/unit/bound_model.h"

namespace {

using Matrix = std::vector<float>;

constexpr auto kCpu = ddp::Device::Kind::kCpu;

Matrix RandomMatrix(int rows, int columns, uint32_t seed) {
  std::mt19937 random(seed);
  Matrix matrix(static_cast<size_t>(rows * columns));
  for (float& x : matrix) x = static_cast<float>(random() * 0x1p-31 - 1);
  return matrix;
}

// To 8 significant bits, ties to even.
Matrix Rounded(Matrix matrix) {
  for (float& x : matrix) {
    uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    std::memcpy(&x, &bits, sizeof x);
  }
  return matrix;
}

Matrix Transposed(const Matrix& matrix, int rows, int columns) {
  Matrix transposed(matrix.size());
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j)
      transposed[static_cast<size_t>(j * rows + i)] = matrix[static_cast<size_t>(i * columns + j)];
  }
  return transposed;
}

// a [m, k] times b [k, n].
Matrix Product(const Matrix& a, const Matrix& b, int m, int k, int n) {
  Matrix c;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int l = 0; l < k; ++l) {
        sum += static_cast<double>(a[static_cast<size_t>(i * k + l)]) *
               static_cast<double>(b[static_cast<size_t>(l * n + j)]);
      }
      c.push_back(static_cast<float>(sum));
    }
  }
  return c;
}

// The norm of the difference over that of `want`.
double Distance(const Matrix& got, const Matrix& want) {
  REQUIRE(got.size() == want.size());
  double difference = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / size);
}

// A layer with its parameters, and what its passes write.
struct Bound {
  Bound(int inputs_, int outputs_, nn::Activation activation, int max_batch)
      : inputs(inputs_),
        outputs(outputs_),
        layer((nn::SetThreads(1), inputs), outputs, activation, max_batch),
        weight(RandomMatrix(outputs, inputs, 1)),
        bias(RandomMatrix(1, outputs, 2)),
        dweight(weight.size(), NAN),
        dbias(bias.size(), NAN) {
    const std::vector<float*> values = {weight.data(), bias.data()}, grads = {dweight.data(), dbias.data()};
    layer.Bind(values, grads);
  }

  void Forward(const Matrix& x, int rows) {
    y.assign(static_cast<size_t>(rows * outputs), NAN);
    layer.Forward(x.data(), y.data(), rows);
  }
  void Backward(const Matrix& x, Matrix dy, int rows, bool accumulate = false) {
    dx.assign(static_cast<size_t>(rows * inputs), NAN);
    layer.Backward(x.data(), y.data(), dy.data(), dx.data(), rows, accumulate, [](size_t) {});
  }

  int inputs, outputs;
  nn::Linear layer;
  Matrix weight, bias, dweight, dbias, y, dx;
};

// That a model for images of one channel and 15 x 14 pixels, in batches of at most 20, learns the same in bfloat16,
// with gradients that differ by no more than `tolerance` of their norm.
void CheckModel(std::unique_ptr<nn::Model> model, double tolerance) {
  constexpr int kPixels = 15 * 14;
  nn::testing::BoundModel bound(std::move(model));
  for (const int rows : {20, 7}) {
    const Matrix x = RandomMatrix(rows, kPixels, 5);
    std::vector<int32_t> labels(static_cast<size_t>(rows));
    for (size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<int32_t>(i % 10);
    const double want = bound.Step(x, labels);
    const std::vector<Matrix> want_grads = bound.grads;
    const ddp::Autocast autocast(kCpu);
    CHECK(std::abs(bound.Step(x, labels) / want - 1) < 0.02);
    for (size_t p = 0; p < bound.grads.size(); ++p) {
      INFO(bound.model->parameters()[p].name);
      CHECK(bound.grads[p] != want_grads[p]);
      CHECK(Distance(bound.grads[p], want_grads[p]) < tolerance);
    }
  }
}

}  // namespace

TEST_CASE("Within autocast a linear layer multiplies rounded factors and sums in float32, backward too") {
  if (!nn::HasBfloat16()) return;
  struct Shape {
    int inputs, outputs, rows;
  };
  for (const Shape& s : {Shape{7, 5, 3}, {64, 32, 16}, {33, 65, 1}, {130, 10, 24}}) {
    INFO(s.inputs << " to " << s.outputs << ", " << s.rows << " rows");
    Bound bound(s.inputs, s.outputs, nn::Activation::kRelu, 24);
    const Matrix x = RandomMatrix(s.rows, s.inputs, 3), dy = RandomMatrix(s.rows, s.outputs, 4);
    {
      const ddp::Autocast autocast(kCpu);
      bound.Forward(x, s.rows);
    }
    // Backward runs in forward's type, after the scope too.
    bound.Backward(x, dy, s.rows);

    Matrix y = Product(Rounded(x), Transposed(Rounded(bound.weight), s.outputs, s.inputs), s.rows, s.inputs, s.outputs);
    Matrix masked = dy, dbias(static_cast<size_t>(s.outputs));
    for (size_t i = 0; i < y.size(); ++i) {
      const size_t output = i % static_cast<size_t>(s.outputs);
      y[i] = std::max(0.0f, y[i] + bound.bias[output]);
      if (!(bound.y[i] > 0)) masked[i] = 0;
      dbias[output] += masked[i];
    }
    CHECK(Distance(bound.y, y) < 1e-6);
    CHECK(Distance(bound.dbias, dbias) < 1e-6);
    const Matrix dweight =
        Product(Transposed(Rounded(masked), s.rows, s.outputs), Rounded(x), s.outputs, s.rows, s.inputs);
    CHECK(Distance(bound.dweight, dweight) < 1e-6);
    CHECK(Distance(bound.dx, Product(Rounded(masked), Rounded(bound.weight), s.rows, s.outputs, s.inputs)) < 1e-6);

    {
      const ddp::Autocast autocast(kCpu);
      bound.Forward(x, s.rows);
    }
    bound.Backward(x, dy, s.rows, /*accumulate=*/true);
    Matrix twice = dweight;
    for (float& g : twice) g *= 2;
    CHECK(Distance(bound.dweight, twice) < 1e-6);

    // Beside float32: as far off as 8 bits are, and no farther.
    const Matrix short_y = bound.y, short_dweight = dweight, short_dx = bound.dx;
    bound.Forward(x, s.rows);
    bound.Backward(x, dy, s.rows);
    for (const auto& [name, got, want] : {std::tuple("y", &short_y, &bound.y),
                                          {"dweight", &short_dweight, &bound.dweight},
                                          {"dx", &short_dx, &bound.dx}}) {
      INFO(name);
      CHECK(Distance(*got, *want) > 1e-4);
      CHECK(Distance(*got, *want) < 2e-2);
    }
  }
}

TEST_CASE("A layer's weight is rounded once in a scope, and anew in the next") {
  if (!nn::HasBfloat16()) return;
  Bound bound(1, 1, nn::Activation::kNone, 1);
  bound.bias = {0};
  bound.weight = {2};
  {
    const ddp::Autocast autocast(kCpu);
    bound.Forward({1}, 1);
    CHECK(bound.y[0] == 2);
    bound.weight[0] = 3;
    bound.Forward({1}, 1);
    CHECK(bound.y[0] == 2);
    const ddp::Autocast inner(kCpu, ddp::DType::kFloat32);
    bound.Forward({1}, 1);
    CHECK(bound.y[0] == 3);
  }
  {
    const ddp::Autocast autocast(kCpu);
    bound.Forward({1}, 1);
    CHECK(bound.y[0] == 3);
  }
  // As the optimizer may: what the backward pass reads is the forward's copy.
  bound.weight[0] = 5;
  bound.Backward({1}, {1}, 1);
  CHECK(bound.dx[0] == 3);
  // There is no float16 on the CPU: the layer stays in float32.
  const ddp::Autocast autocast(kCpu, ddp::DType::kFloat16);
  bound.weight[0] = 1 + 0x1p-20f;
  bound.Forward({1}, 1);
  CHECK(bound.y[0] == 1 + 0x1p-20f);
}

TEST_CASE("Every model's loss and gradients in bfloat16 come near float32's, in batches of two sizes") {
  if (!nn::HasBfloat16()) return;
  nn::SetThreads(1);
  const nn::ImageShape images = {1, 15, 14};
  // A single ReLU that rounding turns on or off shows; normalisations, one upon the other, enlarge it: of ResNet-20
  // this tells a gradient that is missing or has the wrong sign, no more.
  CheckModel(nn::MakeMlp(15 * 14, {40, 30}, 10, 20), 0.15);
  CheckModel(nn::MakeLenet(images, 10, 20, nn::Cpu()), 0.15);
  CheckModel(nn::MakeResnet20(images, 10, 20, nn::Cpu()), 1);
}
