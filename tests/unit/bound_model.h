// SPDX-License-Identifier: Apache-2.0
// The example models on memory of a test's.
#ifndef TESTS_UNIT_BOUND_MODEL_H_
#define TESTS_UNIT_BOUND_MODEL_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/loss.h"
#include "examples/nn/model.h"

namespace nn::testing {

// A model with memory of its own, where DistributedDataParallel would give it some.
struct BoundModel {
  BoundModel(int inputs, const std::vector<int>& hidden, int outputs, int max_batch, uint64_t seed = 1)
      : BoundModel((SetThreads(1), MakeMlp(inputs, hidden, outputs, max_batch)), seed) {}
  explicit BoundModel(std::unique_ptr<Model> model_, uint64_t seed = 1) : model(std::move(model_)) {
    std::vector<float*> value_pointers, grad_pointers;
    for (const ParameterSpec& spec : model->parameters()) {
      values.emplace_back(spec.count());
      grads.emplace_back(spec.count(), NAN);  // what no step has written shows
      value_pointers.push_back(values.back().data());
      grad_pointers.push_back(grads.back().data());
    }
    model->Bind(value_pointers, grad_pointers);
    model->Initialize(seed);
  }

  double Step(absl::Span<const float> x, absl::Span<const int32_t> labels, bool accumulate = false) {
    const auto logits = model->Forward(x.data(), static_cast<int>(labels.size()));
    const double loss = SoftmaxCrossEntropy(logits, labels, model->output_grad());
    model->Backward([](size_t) {}, accumulate);
    return loss;
  }

  std::unique_ptr<Model> model;
  std::vector<std::vector<float>> values, grads;
};

}  // namespace nn::testing

#endif  // TESTS_UNIT_BOUND_MODEL_H_
