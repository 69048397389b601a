// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cuda_linear.h"

#include "absl/strings/str_cat.h"
#include "examples/nn/check.h"
#include "examples/nn/cuda_kernels.h"
#include "examples/nn/cuda_memory.h"
#include "examples/nn/device.h"

namespace nn::cuda {

// cuBLAS's matrices are column-major: the row-major x [rows, I] is its x^T [I, rows], and y = x W^T is y^T = W x^T with
// W [O, I] in memory as [I, O], transposed.
struct GpuLinear::Products {
  Products(MatmulContext& context, int rows, int inputs, int outputs, Activation activation, bool mask_dx)
      : forward(context, {inputs, outputs, true}, {inputs, rows}, context.element,
                activation == Activation::kRelu ? CUBLASLT_EPILOGUE_RELU_AUX_BIAS : CUBLASLT_EPILOGUE_BIAS),
        both_grads(context, {inputs, rows}, {outputs, rows, true}, Element::kFloat32, CUBLASLT_EPILOGUE_BGRADB),
        weight_grad(context, {inputs, rows}, {outputs, rows, true}, Element::kFloat32, CUBLASLT_EPILOGUE_DEFAULT),
        weight_grad_sum(context, {inputs, rows}, {outputs, rows, true}, Element::kFloat32, CUBLASLT_EPILOGUE_DEFAULT,
                        true),
        input_grad(context, {inputs, outputs}, {outputs, rows}, context.element,
                   mask_dx ? CUBLASLT_EPILOGUE_DRELU : CUBLASLT_EPILOGUE_DEFAULT),
        plain_input_grad(context, {inputs, outputs}, {outputs, rows}, context.element, CUBLASLT_EPILOGUE_DEFAULT) {
    if (forward.supported() && weight_grad.supported() && weight_grad_sum.supported() && plain_input_grad.supported()) {
      return;
    }
    throw DeviceError(absl::StrCat("cuBLASLt cannot compute a layer of ", inputs, " inputs and ", outputs,
                                   " outputs for ", rows, " samples; give another --batch, or leave out --amp"));
  }

  Matmul forward, both_grads, weight_grad, weight_grad_sum, input_grad, plain_input_grad;
};

GpuLinear::GpuLinear(MatmulContext& context, int inputs, int outputs, Activation activation, int max_batch,
                     Layer* below)
    : WeightedLayer({outputs, inputs}, inputs, true, 1),
      context_(context),
      inputs_(inputs),
      outputs_(outputs),
      activation_(activation),
      max_batch_(max_batch),
      below_(dynamic_cast<GpuLinear*>(below)) {
  NN_CHECK(inputs > 0 && outputs > 0 && max_batch > 0);
  const auto allocate = [&](size_t bytes) { return AllocateBytes(bytes, context.stream); };
  if (Masks()) mask_ = allocate(Matmul::MaskBytes(outputs, max_batch));
  if (IsShort()) {
    short_weight_ = allocate(2 * static_cast<size_t>(inputs) * static_cast<size_t>(outputs));
    short_bias_ = allocate(2 * static_cast<size_t>(outputs));
  }
  if (below == nullptr && (IsShort() || inputs % 4 != 0)) {
    input_ = allocate(SizeOf(context.element) * static_cast<size_t>(inputs) * static_cast<size_t>(max_batch));
  }
  const Products& products = ProductsFor(max_batch);
  if (below_ != nullptr) below_->masked_above_ = below_->Masks() && products.input_grad.supported();
}

GpuLinear::~GpuLinear() = default;

GpuLinear::Products& GpuLinear::ProductsFor(int rows) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  return products_.Get(rows, [&] {
    return std::make_unique<Products>(context_, rows, inputs_, outputs_, activation_,
                                      below_ != nullptr && below_->Masks());
  });
}

void GpuLinear::Forward(const float* x, float* y, int rows) {
  NN_CHECK(weight_ != nullptr);
  Products& products = ProductsFor(rows);
  const auto width = static_cast<size_t>(outputs_), count = static_cast<size_t>(inputs_);
  if (input_ != nullptr) {
    Check(Cast(context_.element, {x, input_.get(), static_cast<size_t>(rows) * count}, {}, context_.stream),
          "a kernel");
  }
  if (IsShort()) {
    Check(Cast(context_.element, {weight_, short_weight_.get(), width * count}, {bias_, short_bias_.get(), width},
               context_.stream),
          "a kernel");
    products.forward.Run(short_weight_.get(), Input(x), y, short_bias_.get(), mask_.get());
  } else {
    products.forward.Run(weight_, Input(x), y, bias_, mask_.get());
  }
}

void GpuLinear::Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                         GradReadyFn grad_ready) {
  Products& products = ProductsFor(rows);
  if (Masks() && !masked_above_) {
    Check(Mask(context_.element, y, dy, static_cast<size_t>(rows) * static_cast<size_t>(outputs_), context_.stream),
          "a kernel");
  }
  if (!accumulate && products.both_grads.supported()) {
    products.both_grads.Run(Input(x), dy, weight_grad_, bias_grad_, nullptr);
    grad_ready(1);
  } else {
    Check(SumRows(context_.element, dy, rows, outputs_, accumulate, bias_grad_, context_.stream), "a kernel");
    grad_ready(1);
    (accumulate ? products.weight_grad_sum : products.weight_grad).Run(Input(x), dy, weight_grad_, nullptr, nullptr);
  }
  grad_ready(0);
  if (dx == nullptr) return;
  const void* const weight = IsShort() ? short_weight_.get() : static_cast<const void*>(weight_);
  const bool mask_dx = below_ != nullptr && below_->masked_above_;
  // Every number of rows does what was agreed for the largest.
  NN_CHECK(!mask_dx || products.input_grad.supported());
  if (mask_dx) {
    products.input_grad.Run(weight, dy, dx, nullptr, below_->mask_.get());
  } else {
    products.plain_input_grad.Run(weight, dy, dx, nullptr, nullptr);
  }
}

}  // namespace nn::cuda
