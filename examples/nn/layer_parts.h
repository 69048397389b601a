// SPDX-License-Identifier: Apache-2.0
// Helper for layers that consist of other layers.
#ifndef EXAMPLES_NN_LAYER_PARTS_H_
#define EXAMPLES_NN_LAYER_PARTS_H_

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "examples/nn/check.h"
#include "examples/nn/layer.h"

namespace nn {

using LayerPart = std::pair<const char*, Layer*>;  // its name, and the layer

// A layer that consists of other layers, which the derived class owns. Parameters and buffers are named "PART.NAME".
class CompositeLayer : public Layer {
 public:
  absl::Span<const ParameterSpec> parameters() const final { return parameters_; }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) final {
    NN_CHECK(values.size() == parameters_.size() && grads.size() == parameters_.size());
    for (const Part& part : parts_) {
      const size_t count = part.layer->parameters().size();
      part.layer->Bind(values.subspan(part.first, count), grads.subspan(part.first, count));
    }
  }
  std::vector<LayerBuffer> buffers() final {
    std::vector<LayerBuffer> buffers;
    for (const Part& part : parts_) {
      for (LayerBuffer& buffer : part.layer->buffers()) {
        buffers.push_back({absl::StrCat(part.name, ".", buffer.name), std::move(buffer.shape), buffer.data});
      }
    }
    return buffers;
  }
  void SetTraining(bool training) final {
    for (const Part& part : parts_) part.layer->SetTraining(training);
  }
  void Synchronize(SyncGroup* group) final {
    for (const Part& part : parts_) part.layer->Synchronize(group);
  }

 protected:
  // Call it once, when the parts exist.
  void SetParts(const std::vector<LayerPart>& parts) {
    for (const auto& [name, layer] : parts) {
      parts_.push_back({name, layer, parameters_.size()});
      for (ParameterSpec spec : layer->parameters()) {
        spec.name = absl::StrCat(name, ".", spec.name);
        parameters_.push_back(std::move(spec));
      }
    }
  }

  // What part `i` calls to announce its gradients in Backward.
  auto Ready(size_t i, GradReadyFn grad_ready) const {
    return [grad_ready, first = parts_[i].first](size_t parameter) { grad_ready(first + parameter); };
  }

 private:
  struct Part {
    const char* name;
    Layer* layer;
    size_t first;  // its first parameter, among all
  };
  std::vector<Part> parts_;
  std::vector<ParameterSpec> parameters_;
};

// The parts of a bottleneck, named as in two nn.Sequentials. `conv`, `bn`: of the shortcut, or null.
inline std::vector<LayerPart> BottleneckParts(const std::array<Layer*, 6>& body, Layer* conv, Layer* bn) {
  std::vector<LayerPart> parts = {{"body.0", body[0]}, {"body.1", body[1]}, {"body.3", body[2]},
                                  {"body.4", body[3]}, {"body.6", body[4]}, {"body.7", body[5]}};
  if (conv != nullptr) parts.insert(parts.end(), {{"shortcut.0", conv}, {"shortcut.1", bn}});
  return parts;
}

}  // namespace nn

#endif  // EXAMPLES_NN_LAYER_PARTS_H_
