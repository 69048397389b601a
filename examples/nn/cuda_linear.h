// The fully connected layer on a GPU.
#ifndef EXAMPLES_NN_CUDA_LINEAR_H_
#define EXAMPLES_NN_CUDA_LINEAR_H_

#include <memory>

#include "examples/nn/cuda_matmul.h"
#include "examples/nn/linear.h"
#include "examples/nn/per_rows.h"
#include "examples/nn/weighted_layer.h"

namespace nn::cuda {

// As nn::Linear, with activations of the context's type. A step of it takes three launches: y with bias and ReLU; the
// weight's gradient with the bias's; and the input's gradient, in which what the ReLU of the layer below had cut off is
// 0 already. What of the backward pass cuBLASLt cannot do in one on some GPU gets a kernel of its own. Where
// activations have 16 bits a launch before these rounds weight and bias to them.
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
  GpuLinear* const below_;     // null also if it is another layer
  bool masked_above_ = false;  // dy comes with the mask of this layer's ReLU applied
  std::shared_ptr<void> mask_;
  // With activations of 16 bits: weight and bias rounded to them. And a model's input, rounded, or where cuBLASLt finds
  // it aligned.
  std::shared_ptr<void> short_weight_, short_bias_, input_;
  PerRows<Products> products_;
};

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_LINEAR_H_
