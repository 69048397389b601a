// SPDX-License-Identifier: Apache-2.0
// The interface of all layers of the example models.
#ifndef EXAMPLES_NN_LAYER_H_
#define EXAMPLES_NN_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace nn {

class SyncGroup;

// One trainable tensor, row-major. The layer chooses its name ("weight"); a Model adds the layer's name in front
// ("3.weight").
struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;
  int64_t fan_in = 0;  // inputs per output; determines the range of the initial values
  float initial = 0;   // if fan_in is 0: all initial values
  int64_t uses = 0;    // how often a sample's Forward multiplies with each element, in products and convolutions

  size_t count() const;  // the product of the shape
};

// State of a layer that is no parameter, such as a batch norm's running statistics. Forward passes change it, not
// gradients. It is part of the model's state. The layer owns the memory, which lives as long as the layer.
struct LayerBuffer {
  std::string name;  // like a parameter's
  std::vector<int64_t> shape;
  absl::Span<float> data;
};

// Called with the index of a parameter as soon as its gradient has been written.
using GradReadyFn = absl::FunctionRef<void(size_t)>;

// A layer. It borrows the memory of its parameters and of the activations. So gradients can be written to the memory in
// which they are reduced, and the model decides where activations are.
//
// An activation is memory of `rows` times `output_size()` floats, samples outermost. Adjacent layers agree on three
// things when the model is built: the order of the numbers of a sample (plain, or blocked by channels), their type
// (16-bit floats use half of the memory, without gaps), and their place (host or device). At run time only pointers are
// passed.
//
// Thread-safety: one thread at a time.
class Layer {
 public:
  virtual ~Layer() = default;

  // Floats per sample of the input and the output, including padding.
  virtual int input_size() const = 0;
  virtual int output_size() const = 0;

  // Empty for a layer without parameters.
  virtual absl::Span<const ParameterSpec> parameters() const = 0;

  // Sets the memory of the parameters and of their gradients, one pointer each in the order of parameters(). Call it
  // before the first Forward. The memory must stay valid while the layer is used; a GPU's begins at multiples of 16
  // bytes.
  virtual void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) = 0;

  // Empty for a layer without such state.
  virtual std::vector<LayerBuffer> buffers() { return {}; }

  // Says whether the next Forward is for training, so that a Backward may follow (initially true), or for evaluation.
  // Only some layers differ between the two.
  virtual void SetTraining(bool /*training*/) {}

  // In training, layers that compute statistics of a batch compute them of the batches of all ranks of `group`, or of
  // this rank's alone if that is null (the initial state). The group must outlive its use.
  virtual void Synchronize(SyncGroup* /*group*/) {}

  // Computes y = f(x) for `rows` samples: from 1 to the largest batch that the layer was built for.
  virtual void Forward(const float* x, float* y, int rows) = 0;

  // `dy` is the loss's gradient with respect to y. Writes the parameters' gradients (adds them, with `accumulate`) and
  // calls `grad_ready` for each. Then writes `dx`, unless it is null. x, y and rows are those of the last Forward,
  // which must have been for training. Overwrites dy.
  virtual void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                        GradReadyFn grad_ready) = 0;
};

}  // namespace nn

#endif  // EXAMPLES_NN_LAYER_H_
