// The fully connected layer on a GPU.
#ifndef EXAMPLES_NN_CUDA_LINEAR_H_
#define EXAMPLES_NN_CUDA_LINEAR_H_

#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/cuda_matmul.h"
#include "examples/nn/layer.h"
#include "examples/nn/linear.h"
#include "examples/nn/per_rows.h"

namespace nn::cuda {

// As nn::Linear, with activations of the context's type. A step of it takes three launches: y with bias and ReLU; the
// weight's gradient with the bias's; and the input's gradient, in which what the ReLU of the layer below had cut off is
// 0 already. What of the backward pass cuBLASLt cannot do in one on some GPU gets a kernel of its own. Where
// activations have 16 bits a launch before these rounds weight and bias to them.
class GpuLinear final : public Layer {
 public:
  // `below`: see Device::MakeLinear.
  GpuLinear(MatmulContext& context, int inputs, int outputs, Activation activation, int max_batch, Layer* below);
  ~GpuLinear() override;

  int input_size() const override { return input_ == nullptr ? Floats(inputs_) : inputs_; }
  int output_size() const override { return Floats(outputs_); }
  absl::Span<const ParameterSpec> parameters() const override { return parameters_; }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) override;
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
  std::vector<ParameterSpec> parameters_;
  PerRows<Products> products_;
  const float* weight_ = nullptr;
  const float* bias_ = nullptr;
  float* weight_grad_ = nullptr;
  float* bias_grad_ = nullptr;
};

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_LINEAR_H_
