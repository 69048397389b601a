// SPDX-License-Identifier: Apache-2.0
// A chain of layers and its activations: forward, backward, and a callback when a gradient is ready.
#ifndef EXAMPLES_NN_MODEL_H_
#define EXAMPLES_NN_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/device.h"
#include "examples/nn/layer.h"

namespace nn {

// A layer and its name in the model, which is part of the names of its parameters.
struct NamedLayer {
  std::string name;
  std::unique_ptr<Layer> layer;
};

// A sequence of layers. The model does not know about ranks: it reads values and writes gradients in the given memory,
// and calls a function when a gradient is done.
//
//   std::unique_ptr<nn::Model> model = nn::MakeMlp(784, {1024, 1024}, 10, /*max_batch=*/64);
//   model->Bind(values, grads);       // one float* per model->parameters()[i]
//   model->Initialize(seed);
//   for (...) {
//     absl::Span<const float> logits = model->Forward(images, rows);
//     double loss = nn::SoftmaxCrossEntropy(logits, labels, model->output_grad());
//     model->Backward([&](size_t i) { ddp->GradReady(i); });
//     ...
//   }
//
// A mistake of the caller (too many rows, a wrong number of pointers) ends the program with a message; see NN_CHECK.
// Thread-safety: one thread at a time.
class Model {
 public:
  // Each layer's input has the size of the output before it. A batch has up to `max_batch` rows. All layers are of
  // `device`, which must outlive the model.
  Model(std::vector<NamedLayer> layers, int max_batch, Device& device = Cpu());

  Device& device() const { return device_; }

  int input_size() const { return layers_.front().layer->input_size(); }
  int output_size() const { return layers_.back().layer->output_size(); }
  int max_batch() const { return max_batch_; }

  // The parameters in the order in which Forward uses them. Backward announces them in reverse order.
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }

  // The floating-point operations of a sample's Forward and Backward: the multiplications and additions of matrix
  // products and convolutions. Those of other layers, and of the optimizer, are not counted.
  int64_t flops() const;

  // The buffers of all layers, each with the layer's name in front.
  const std::vector<LayerBuffer>& buffers() const { return buffers_; }

  // Says whether the next Forward is for training (initially true), or for evaluation, after which no Backward follows.
  void SetTraining(bool training);

  // See Layer::Synchronize. Call it between steps, on all ranks of the group or on none.
  void Synchronize(SyncGroup* group);

  // Sets the memory of each parameter and of its gradient. It is borrowed and must stay valid while the model is used.
  // The old contents of the gradients do not matter.
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads);

  // Initialises all parameters like PyTorch's layers: uniform in +-1/sqrt(fan_in), or the value in the parameter's
  // spec. The values depend only on `seed` and on the parameter's index. Call it after Bind.
  void Initialize(uint64_t seed);

  // Returns the outputs for the samples at `x`, [rows, input_size()], row by row as the last layer writes them. `rows`
  // is 1 to max_batch. x is borrowed until Backward; the outputs are valid until the next Forward.
  absl::Span<const float> Forward(const float* x, int rows);

  // The memory for the loss's gradient with respect to the outputs of the last Forward, with the same layout as these.
  // It has room for the largest batch.
  absl::Span<float> output_grad();

  // Computes the gradients for the last Forward, from the last parameter to the first, and calls grad_ready(i) as soon
  // as the gradient of parameter i is complete. With `accumulate` they are added to the old gradients. Overwrites
  // output_grad().
  void Backward(GradReadyFn grad_ready, bool accumulate = false);

 private:
  std::vector<NamedLayer> layers_;
  Device& device_;
  int max_batch_;
  int rows_ = 0;
  std::vector<ParameterSpec> parameters_;
  std::vector<LayerBuffer> buffers_;
  std::vector<size_t> first_parameter_;  // per layer, and one past the last
  std::vector<float*> values_;
  const float* input_ = nullptr;
  std::vector<std::shared_ptr<float>> outputs_;  // one per layer
  std::shared_ptr<float> grads_[2];              // gradients of a layer's output and input, alternately
};

// A multi-layer perceptron: linear layers with ReLU between them. `hidden` may be empty. Parameters have the names and
// shapes of PyTorch's nn.Sequential(Flatten, Linear, ReLU, Linear, ReLU, Linear): "1.weight" [out, in], "1.bias" [out],
// "3.weight", ...
std::unique_ptr<Model> MakeMlp(int inputs, absl::Span<const int> hidden, int outputs, int max_batch,
                               Device& device = Cpu());

// Sets the number of threads that compute in models created and used by the calling thread. Call it before MakeMlp,
// because products are planned for this number. Default: all cores that the process may run on, so that two ranks would
// compete for the same cores.
void SetThreads(int threads);

}  // namespace nn

#endif  // EXAMPLES_NN_MODEL_H_
