// SPDX-License-Identifier: Apache-2.0
// The fully connected layer.
#ifndef EXAMPLES_NN_LINEAR_H_
#define EXAMPLES_NN_LINEAR_H_

#include <memory>

#include "ddp/process_group.h"
#include "examples/nn/per_rows.h"
#include "examples/nn/weighted_layer.h"

namespace nn {

// The function that is applied to each output of a layer. It is part of the layer instead of a separate layer, because
// it then needs no further pass over the activations: Forward applies it in the last store of the product, Backward in
// the pass that sums the bias gradient.
enum class Activation { kNone, kRelu };

// y = activation(x W^T + b), with W "weight" [outputs, inputs] and b "bias" [outputs], on the CPU. Parameters and
// activations are float32. In a ddp::Autocast scope for bfloat16, the factors of products are rounded to bfloat16, in
// Forward and in its Backward. This needs onednn::HasBfloat16().
class Linear final : public WeightedLayer {
 public:
  Linear(int inputs, int outputs, Activation activation, int max_batch);
  ~Linear() override;

  int input_size() const override { return inputs_; }
  int output_size() const override { return outputs_; }
  void Forward(const float* x, float* y, int rows) override;
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override;

 private:
  struct Products;
  Products& ProductsFor(int rows, bool bfloat16);

  int inputs_;
  int outputs_;
  Activation activation_;
  int max_batch_;
  PerRows<Products> products_, bfloat16_products_;
  bool bfloat16_ = false;            // the last Forward used bfloat16
  ddp::Allocation bfloat16_weight_;  // the weight that it used, kept until its Backward is done
};

}  // namespace nn

#endif  // EXAMPLES_NN_LINEAR_H_
