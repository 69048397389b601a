// SPDX-License-Identifier: Apache-2.0
// The fully connected layer on a GPU.
#ifndef EXAMPLES_NN_CUDA_LINEAR_H_
#define EXAMPLES_NN_CUDA_LINEAR_H_

#include <memory>

#include "examples/nn/cuda_matmul.h"
#include "examples/nn/linear.h"
#include "examples/nn/per_rows.h"
#include "examples/nn/weighted_layer.h"

namespace nn::cuda {

// Like nn::Linear, with activations of the context's type. A step takes three launches: y with bias and ReLU; the
// gradients of weight and bias; and the gradient of the input, which already includes the ReLU of the layer below.
// Parts of the backward pass that cuBLASLt cannot combine on some GPU use a separate kernel. With 16-bit activations,
// another launch first rounds weight and bias to 16 bits.
class GpuLinear final : public WeightedLayer {
 public:
  // `below`: see Device::MakeLinear.
  GpuLinear(MatmulContext& context, int inputs, int outputs, Activation activation, int max_batch, Layer* below);
  ~GpuLinear() override;

  int input_size() const override { return input_ == nullptr ? Floats(inputs_) : inputs_; }
  int output_size() const override { return Floats(outputs_); }
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  struct Products;
  Products& ProductsFor(int rows);
  bool Masks() const { return activation_ == Activation::kRelu; }
  bool IsShort() const { return context_.element != Element::kFloat32; }
  const void* Input(const float* x) const { return input_ != nullptr ? input_.get() : x; }
  int Floats(int elements) const { return IsShort() ? (elements + 1) / 2 : elements; }

  MatmulContext& context_;
  const int inputs_, outputs_;
  const Activation activation_;
  const int max_batch_;
  GpuLinear* const below_;     // null also if the layer below is of another kind
  bool masked_above_ = false;  // dy already includes the mask of this layer's ReLU
  std::shared_ptr<void> mask_;
  // With 16-bit activations: rounded copies of weight and bias. Also a copy of the model's input, rounded, or aligned
  // for cuBLASLt.
  std::shared_ptr<void> short_weight_, short_bias_, input_;
  PerRows<Products> products_;
};

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_LINEAR_H_
