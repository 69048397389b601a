// Helper for layers that consist of other layers.
#ifndef EXAMPLES_NN_LAYER_PARTS_H_
#define EXAMPLES_NN_LAYER_PARTS_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "examples/nn/check.h"
#include "examples/nn/layer.h"

namespace nn {

// The parameters and buffers of several layers, with names "PART.NAME". The layers must outlive it.
class LayerParts {
 public:
  explicit LayerParts(const std::vector<std::pair<const char*, Layer*>>& parts) {
    for (const auto& [name, layer] : parts) {
      parts_.push_back({name, layer, parameters_.size()});
      for (ParameterSpec spec : layer->parameters()) {
        spec.name = absl::StrCat(name, ".", spec.name);
        parameters_.push_back(std::move(spec));
      }
    }
  }

  absl::Span<const ParameterSpec> parameters() const { return parameters_; }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) const {
    NN_CHECK(values.size() == parameters_.size() && grads.size() == parameters_.size());
    for (const Part& part : parts_) {
      const size_t count = part.layer->parameters().size();
      part.layer->Bind(values.subspan(part.first, count), grads.subspan(part.first, count));
    }
  }
  std::vector<LayerBuffer> buffers() const {
    std::vector<LayerBuffer> buffers;
    for (const Part& part : parts_) {
      for (LayerBuffer& buffer : part.layer->buffers()) {
        buffers.push_back({absl::StrCat(part.name, ".", buffer.name), std::move(buffer.shape), buffer.data});
      }
    }
    return buffers;
  }
  void SetTraining(bool training) const {
    for (const Part& part : parts_) part.layer->SetTraining(training);
  }

  // Returns the index of the first parameter of part `i` among all parameters.
  size_t first(size_t i) const { return parts_[i].first; }

 private:
  struct Part {
    const char* name;
    Layer* layer;
    size_t first;
  };
  std::vector<Part> parts_;
  std::vector<ParameterSpec> parameters_;
};

}  // namespace nn

#endif  // EXAMPLES_NN_LAYER_PARTS_H_
