// The fully connected layer on a GPU.
#ifndef EXAMPLES_NN_CUDA_LINEAR_H_
#define EXAMPLES_NN_CUDA_LINEAR_H_

#include <map>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/cuda_matmul.h"
#include "examples/nn/layer.h"
#include "examples/nn/linear.h"

namespace nn::cuda {

// As nn::Linear. A step of it takes three launches: y with bias and ReLU; the weight's gradient with the bias's; and
// the input's gradient, in which what the ReLU of the layer below had cut off is 0 already. What cuBLASLt cannot do in
// one pass on some GPU gets a kernel of its own.
class GpuLinear final : public Layer {
 public:
  // `below`: see Device::MakeLinear; here also a GpuLinear.
  GpuLinear(MatmulContext& context, int inputs, int outputs, Activation activation, int max_batch, GpuLinear* below);
  ~GpuLinear() override;

  int input_size() const override { return inputs_; }
  int output_size() const override { return outputs_; }
  absl::Span<const ParameterSpec> parameters() const override { return parameters_; }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) override;
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  struct Products;
  Products& ProductsFor(int rows);
  bool Masks() const { return activation_ == Activation::kRelu; }

  MatmulContext& context_;
  const int inputs_, outputs_;
  const Activation activation_;
  const int max_batch_;
  GpuLinear* const below_;
  bool masked_above_ = false;  // dy comes with the mask of this layer's ReLU applied
  std::shared_ptr<void> mask_;
  std::vector<ParameterSpec> parameters_;
  std::map<int, std::unique_ptr<Products>> products_;  // by number of rows
  const float* weight_ = nullptr;
  const float* bias_ = nullptr;
  float* weight_grad_ = nullptr;
  float* bias_grad_ = nullptr;
};

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_LINEAR_H_
