// The fully connected layer.
#ifndef EXAMPLES_NN_LINEAR_H_
#define EXAMPLES_NN_LINEAR_H_

#include <map>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/layer.h"

namespace nn {

// What is applied to each output of a layer. It belongs to the layer, and is not one of its own, because its forward
// rides on the product's last store, and its backward on the pass that sums the bias gradient: neither reads the
// activations once more.
enum class Activation { kNone, kRelu };

// y = activation(x W^T + b), with W "weight" [outputs, inputs] and b "bias" [outputs], in float32 on the CPU.
class Linear final : public Layer {
 public:
  Linear(int inputs, int outputs, Activation activation, int max_batch);
  ~Linear() override;

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

  int inputs_;
  int outputs_;
  Activation activation_;
  int max_batch_;
  std::vector<ParameterSpec> parameters_;
  std::map<int, std::unique_ptr<Products>> products_;  // by number of rows: full batches and a smaller last one
  const float* weight_ = nullptr;
  const float* bias_ = nullptr;
  float* weight_grad_ = nullptr;
  float* bias_grad_ = nullptr;
};

}  // namespace nn

#endif  // EXAMPLES_NN_LINEAR_H_
