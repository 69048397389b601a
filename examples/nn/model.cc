// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/model.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/nn/check.h"
#include "examples/nn/linear.h"
#include "examples/nn/onednn.h"

namespace nn {

size_t ParameterSpec::count() const {
  size_t product = 1;
  for (const int64_t n : shape) product *= static_cast<size_t>(n);
  return product;
}

Model::Model(std::vector<NamedLayer> layers, int max_batch, Device& device)
    : layers_(std::move(layers)), device_(device), max_batch_(max_batch) {
  NN_CHECK(!layers_.empty() && max_batch > 0);
  const auto batch = static_cast<size_t>(max_batch);
  size_t widest = 0;
  int width = input_size();
  for (const NamedLayer& named : layers_) {
    Layer& layer = *named.layer;
    NN_CHECK(layer.input_size() == width);
    width = layer.output_size();
    widest = std::max(widest, static_cast<size_t>(width));
    outputs_.push_back(device.Allocate(batch * static_cast<size_t>(width)));
    first_parameter_.push_back(parameters_.size());
    for (ParameterSpec spec : layer.parameters()) {
      spec.name = absl::StrCat(named.name, ".", spec.name);
      parameters_.push_back(std::move(spec));
    }
    for (LayerBuffer& buffer : layer.buffers()) {
      buffers_.push_back({absl::StrCat(named.name, ".", buffer.name), std::move(buffer.shape), buffer.data});
    }
  }
  first_parameter_.push_back(parameters_.size());
  for (std::shared_ptr<float>& grad : grads_) grad = device.Allocate(batch * widest);
}

void Model::Bind(absl::Span<float* const> values, absl::Span<float* const> grads) {
  NN_CHECK(values.size() == parameters_.size() && grads.size() == parameters_.size());
  for (size_t i = 0; i < values.size(); ++i) NN_CHECK(values[i] != nullptr && grads[i] != nullptr);
  values_.assign(values.begin(), values.end());
  for (size_t l = 0; l < layers_.size(); ++l) {
    const size_t first = first_parameter_[l];
    const size_t count = first_parameter_[l + 1] - first;
    layers_[l].layer->Bind(values.subspan(first, count), grads.subspan(first, count));
  }
}

int64_t Model::flops() const {
  int64_t total = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t forward = 2 * static_cast<int64_t>(parameters_[i].count()) * parameters_[i].uses;
    // As many for the weight's gradient, and for that of the input, unless it is the model's.
    total += forward * (i < first_parameter_[1] ? 2 : 3);
  }
  return total;
}

void Model::SetTraining(bool training) {
  for (const NamedLayer& named : layers_) named.layer->SetTraining(training);
}

void Model::Synchronize(SyncGroup* group) {
  for (const NamedLayer& named : layers_) named.layer->Synchronize(group);
}

void Model::Initialize(uint64_t seed) {
  NN_CHECK(values_.size() == parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // A generator and an interval of our own: the standard library's distributions differ between implementations.
    std::seed_seq sequence{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(i)};
    std::mt19937 random(sequence);
    std::vector<float> values(parameters_[i].count());
    if (parameters_[i].fan_in == 0) {
      std::fill(values.begin(), values.end(), parameters_[i].initial);
    } else {
      const double bound = 1 / std::sqrt(static_cast<double>(parameters_[i].fan_in));
      for (float& value : values) value = static_cast<float>((random() * 0x1p-31 - 1) * bound);
    }
    device_.Upload(values.data(), values_[i], values.size() * sizeof(float));
    device_.Wait();
  }
}

absl::Span<const float> Model::Forward(const float* x, int rows) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  rows_ = rows;
  input_ = x;
  for (size_t l = 0; l < layers_.size(); ++l) {
    layers_[l].layer->Forward(x, outputs_[l].get(), rows);
    x = outputs_[l].get();
  }
  return {x, static_cast<size_t>(rows) * static_cast<size_t>(output_size())};
}

absl::Span<float> Model::output_grad() {
  return {grads_[0].get(), static_cast<size_t>(max_batch_) * static_cast<size_t>(output_size())};
}

void Model::Backward(GradReadyFn grad_ready, bool accumulate) {
  NN_CHECK(rows_ > 0);
  float* dy = grads_[0].get();
  float* dx = grads_[1].get();
  for (size_t l = layers_.size(); l-- > 0;) {
    const float* x = l == 0 ? input_ : outputs_[l - 1].get();
    const size_t first = first_parameter_[l];
    // Nobody asks for the gradient of the model's input.
    layers_[l].layer->Backward(x, outputs_[l].get(), dy, l == 0 ? nullptr : dx, rows_, accumulate,
                               [&](size_t i) { grad_ready(first + i); });
    std::swap(dy, dx);
  }
}

void SetThreads(int threads) { onednn::SetThreads(threads); }

std::unique_ptr<Model> MakeMlp(int inputs, absl::Span<const int> hidden, int outputs, int max_batch, Device& device) {
  // A linear layer and its ReLU are one layer here, and two in the PyTorch model whose names we use; layer 0 there
  // flattens the images.
  std::vector<NamedLayer> layers;
  int width = inputs;
  const auto add = [&](int next, Activation activation) {
    Layer* const below = layers.empty() ? nullptr : layers.back().layer.get();
    layers.push_back(
        {absl::StrCat(2 * layers.size() + 1), device.MakeLinear(width, next, activation, max_batch, below)});
    width = next;
  };
  for (const int next : hidden) add(next, Activation::kRelu);
  add(outputs, Activation::kNone);
  return std::make_unique<Model>(std::move(layers), max_batch, device);
}

}  // namespace nn
