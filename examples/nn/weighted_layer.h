// SPDX-License-Identifier: Apache-2.0
// Base class of layers with a weight.
#ifndef EXAMPLES_NN_WEIGHTED_LAYER_H_
#define EXAMPLES_NN_WEIGHTED_LAYER_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/check.h"
#include "examples/nn/layer.h"

namespace nn {

// Its parameters are "weight" and optionally "bias".
class WeightedLayer : public Layer {
 public:
  absl::Span<const ParameterSpec> parameters() const final { return parameters_; }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) final {
    NN_CHECK(values.size() == parameters_.size() && grads.size() == parameters_.size());
    weight_ = values[0];
    weight_grad_ = grads[0];
    if (!has_bias()) return;
    bias_ = values[1];
    bias_grad_ = grads[1];
  }

 protected:
  // For a layer whose outputs are sums of `fan_in` products, in which each weight is used `uses` times per sample.
  // Weight and bias have the same range of initial values.
  WeightedLayer(std::vector<int64_t> weight_shape, int64_t fan_in, bool bias, int64_t uses) {
    const int64_t outputs = weight_shape[0];
    parameters_ = {{.name = "weight", .shape = std::move(weight_shape), .fan_in = fan_in, .uses = uses}};
    if (bias) parameters_.push_back({"bias", {outputs}, fan_in});
  }
  // For a layer that scales and shifts each of `channels` channels.
  explicit WeightedLayer(int channels)
      : parameters_({{.name = "weight", .shape = {channels}, .initial = 1},
                     {.name = "bias", .shape = {channels}, .initial = 0}}) {}

  bool has_bias() const { return parameters_.size() > 1; }

  // Null before Bind. The bias pointers are also null if there is no bias.
  const float* weight_ = nullptr;
  const float* bias_ = nullptr;
  float* weight_grad_ = nullptr;
  float* bias_grad_ = nullptr;

 private:
  std::vector<ParameterSpec> parameters_;
};

}  // namespace nn

#endif  // EXAMPLES_NN_WEIGHTED_LAYER_H_
