#include "examples/nn/linear.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "examples/nn/check.h"
#include "examples/nn/kernels.h"
#include "examples/nn/onednn.h"

namespace nn {

using onednn::MatMul;
using onednn::Order;

// The matrix products of one number of rows, planned once. With x [rows, I], W [O, I], y [rows, O], all row-major, a
// transposed operand is the same memory read by columns:  y = x W^T,  dW = dy^T x.  The plain product dx = dy W needs
// no plan.
struct Linear::Products {
  Products(int rows, int inputs, int outputs, Activation activation)
      : forward({.m = rows, .n = outputs, .k = inputs}, Order::kByRows, Order::kByColumns,
                {.bias = true, .relu = activation == Activation::kRelu}),
        weight_grad({.m = outputs, .n = inputs, .k = rows}, Order::kByColumns, Order::kByRows, {}) {}

  MatMul forward;
  MatMul weight_grad;
  std::optional<MatMul> weight_grad_sum;  // dW += dy^T x, made when first needed
};

Linear::Linear(int inputs, int outputs, Activation activation, int max_batch)
    : inputs_(inputs), outputs_(outputs), activation_(activation), max_batch_(max_batch) {
  NN_CHECK(inputs > 0 && outputs > 0 && max_batch > 0);
  parameters_ = {{"weight", {outputs, inputs}, inputs}, {"bias", {outputs}, inputs}};
  ProductsFor(max_batch);
  onednn::WarmUp();
}

Linear::~Linear() = default;

Linear::Products& Linear::ProductsFor(int rows) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  std::unique_ptr<Products>& products = products_[rows];
  if (products == nullptr) products = std::make_unique<Products>(rows, inputs_, outputs_, activation_);
  return *products;
}

void Linear::Bind(absl::Span<float* const> values, absl::Span<float* const> grads) {
  NN_CHECK(values.size() == 2 && grads.size() == 2);
  weight_ = values[0];
  bias_ = values[1];
  weight_grad_ = grads[0];
  bias_grad_ = grads[1];
}

void Linear::Forward(const float* x, float* y, int rows) {
  NN_CHECK(weight_ != nullptr);
  ProductsFor(rows).forward.Run(x, weight_, bias_, y);
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

  Products& products = ProductsFor(rows);
  if (!accumulate) {
    products.weight_grad.Run(dy, x, nullptr, weight_grad_);
  } else {
    if (!products.weight_grad_sum.has_value()) {
      products.weight_grad_sum.emplace(onednn::Shape{.m = outputs_, .n = inputs_, .k = rows}, Order::kByColumns,
                                       Order::kByRows, onednn::Epilogue{.accumulate = true});
    }
    products.weight_grad_sum->Run(dy, x, nullptr, weight_grad_);
  }
  grad_ready(0);

  if (dx != nullptr) onednn::Multiply({.m = rows, .n = inputs_, .k = outputs_}, dy, weight_, dx);
}

}  // namespace nn
