// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/linear.h"

#include <algorithm>
#include <memory>
#include <new>
#include <optional>

#include "absl/status/statusor.h"
#include "ddp/autocast.h"
#include "examples/nn/check.h"
#include "examples/nn/kernels.h"
#include "examples/nn/onednn.h"

namespace nn {

using onednn::Factors;
using onednn::MatMul;
using onednn::Order;

// The matrix products of one number of rows, planned once. With x [rows, I], W [O, I], y [rows, O], all row-major, a
// transposed operand is the same memory read by columns:  y = x W^T,  dW = dy^T x,  dx = dy W.
struct Linear::Products {
  // What is multiplied in bfloat16; in float32 the product for dx needs no plan.
  struct Short {
    Short(int rows, int inputs, int outputs)
        : x(rows, inputs),
          dy(rows, outputs),
          input_grad({.m = rows, .n = inputs, .k = outputs}, Order::kByRows, Order::kByRows, {}, Factors::kBFloat16) {}

    onednn::Rounded x, dy;
    MatMul input_grad;
  };

  Products(int rows, int inputs, int outputs, bool bfloat16)
      : factors(bfloat16 ? Factors::kBFloat16 : Factors::kFloat32),
        forward({.m = rows, .n = outputs, .k = inputs}, Order::kByRows, Order::kByColumns, {.bias = true}, factors),
        weight_grad({.m = outputs, .n = inputs, .k = rows}, Order::kByColumns, Order::kByRows, {}, factors) {
    if (bfloat16) rounded.emplace(rows, inputs, outputs);
  }

  Factors factors;
  MatMul forward;
  MatMul weight_grad;
  std::optional<MatMul> weight_grad_sum;  // dW += dy^T x, made when first needed
  std::optional<Short> rounded;
};

Linear::Linear(int inputs, int outputs, Activation activation, int max_batch)
    : WeightedLayer({outputs, inputs}, inputs, true, 1),
      inputs_(inputs),
      outputs_(outputs),
      activation_(activation),
      max_batch_(max_batch) {
  NN_CHECK(inputs > 0 && outputs > 0 && max_batch > 0);
  ProductsFor(max_batch, false);
  onednn::WarmUp();
}

Linear::~Linear() = default;

Linear::Products& Linear::ProductsFor(int rows, bool bfloat16) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  return (bfloat16 ? bfloat16_products_ : products_).Get(rows, [&] {
    return std::make_unique<Products>(rows, inputs_, outputs_, bfloat16);
  });
}

void Linear::Forward(const float* x, float* y, int rows) {
  NN_CHECK(weight_ != nullptr);
  bfloat16_ = ddp::Autocast::TypeFor(ddp::AutocastOp::kLinear, ddp::Device::Kind::kCpu, {ddp::DType::kFloat32}) ==
              ddp::DType::kBFloat16;
  Products& products = ProductsFor(rows, bfloat16_);
  const void* left = x;
  const void* right = weight_;
  if (bfloat16_) {
    const size_t count = static_cast<size_t>(outputs_) * static_cast<size_t>(inputs_);
    absl::StatusOr<ddp::Allocation> weight = ddp::Autocast::CastWeight(
        {const_cast<float*>(weight_), count, ddp::DType::kFloat32, {}}, ddp::DType::kBFloat16);
    if (absl::IsResourceExhausted(weight.status())) throw std::bad_alloc();
    NN_CHECK(weight.ok());
    bfloat16_weight_ = *std::move(weight);
    products.rounded->x.Round(x);
    left = products.rounded->x.data();
    right = bfloat16_weight_.data();
  }
  products.forward.Run(left, right, bias_, y);
  if (activation_ == Activation::kRelu) Relu(y, static_cast<size_t>(rows) * static_cast<size_t>(outputs_));
}

void Linear::Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                      GradReadyFn grad_ready) {
  const auto n = static_cast<size_t>(rows);
  const auto width = static_cast<size_t>(outputs_);
  if (!accumulate) std::fill_n(bias_grad_, width, 0.0f);
  if (activation_ == Activation::kRelu) {
    MaskAndSumRows(y, dy, n, width, bias_grad_);
  } else {
    SumRows(dy, n, width, bias_grad_);
  }
  grad_ready(1);

  Products& products = ProductsFor(rows, bfloat16_);
  const void* left = dy;
  const void* right = x;
  if (bfloat16_) {
    products.rounded->dy.Round(dy);
    left = products.rounded->dy.data();
    right = products.rounded->x.data();  // of the last Forward
  }
  if (accumulate && !products.weight_grad_sum.has_value()) {
    products.weight_grad_sum.emplace(onednn::Shape{.m = outputs_, .n = inputs_, .k = rows}, Order::kByColumns,
                                     Order::kByRows, onednn::Epilogue{.accumulate = true}, products.factors);
  }
  (accumulate ? *products.weight_grad_sum : products.weight_grad).Run(left, right, nullptr, weight_grad_);
  grad_ready(0);

  if (dx != nullptr && bfloat16_) {
    products.rounded->input_grad.Run(left, bfloat16_weight_.data(), nullptr, dx);
  } else if (dx != nullptr) {
    onednn::Multiply({.m = rows, .n = inputs_, .k = outputs_}, dy, weight_, dx);
  }
  bfloat16_weight_ = {};
}

}  // namespace nn
