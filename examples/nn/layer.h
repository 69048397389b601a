// What every layer of the example models looks like to the chain that holds it.
#ifndef EXAMPLES_NN_LAYER_H_
#define EXAMPLES_NN_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace nn {

// One trainable tensor, row-major. A layer names its own ("weight"); a Model puts the layer's name before it
// ("3.weight").
struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;
  int64_t fan_in = 0;  // inputs that one output sums over; decides the range of the initial values
  float initial = 0;   // where fan_in is 0: every initial value

  size_t count() const;  // the product of the shape
};

// What a layer remembers beside its parameters, like a batch norm's running statistics: it changes in forward passes,
// not by gradients, and belongs to the model as they do. The memory is the layer's, for its life.
struct LayerBuffer {
  std::string name;  // as a parameter's
  std::vector<int64_t> shape;
  absl::Span<float> data;
};

// Called with the index of a parameter as soon as its gradient has been written.
using GradReadyFn = absl::FunctionRef<void(size_t)>;

// A layer owns neither its parameters nor the activations: both are borrowed, so that gradients can be written where
// they will be reduced, and the chain decides where activations live.
//
// An activation is memory of `rows` times `output_size()` floats, samples outermost. How the numbers of one sample are
// ordered (plain, or blocked by channels), what they are (16-bit floats take half of the memory, without gaps), and
// where they live (host or device), is agreed between neighbours when the chain is built; at run time only pointers
// pass.
//
// Thread-safety: one thread at a time.
class Layer {
 public:
  virtual ~Layer() = default;

  // Floats per sample of an activation, any padding included.
  virtual int input_size() const = 0;
  virtual int output_size() const = 0;

  // Empty for a layer that learns nothing.
  virtual absl::Span<const ParameterSpec> parameters() const = 0;

  // Where the parameters and their gradients live, one pointer each in the order of parameters(). Before the first
  // Forward; the memory outlives the layer's use.
  virtual void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) = 0;

  // Empty for a layer that remembers nothing.
  virtual std::vector<LayerBuffer> buffers() { return {}; }

  // Whether the next Forward is one of training, which a Backward may follow (true at first), or of evaluation. For
  // layers that differ.
  virtual void SetTraining(bool /*training*/) {}

  // y = f(x), for `rows` samples, from 1 to the largest batch that the layer was built for.
  virtual void Forward(const float* x, float* y, int rows) = 0;

  // From the loss's gradient `dy` with respect to y, writes (adds, with `accumulate`) the parameters' gradients and
  // announces each to `grad_ready`, then writes `dx`, unless that is null. x, y and rows are those of the last Forward,
  // which was one of training. Overwrites dy.
  virtual void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                        GradReadyFn grad_ready) = 0;
};

}  // namespace nn

#endif  // EXAMPLES_NN_LAYER_H_
