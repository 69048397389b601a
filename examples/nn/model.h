// A chain of layers with its activations: forward, backward, and a word when each gradient is ready.
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

// A layer and the name that its parameters carry in the model.
struct NamedLayer {
  std::string name;
  std::unique_ptr<Layer> layer;
};

// Layers one after the other. The model knows nothing of ranks: it reads values and writes gradients in memory it is
// given, and says when each gradient is done.
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
// A mistake of the caller (too many rows, the wrong number of pointers) ends the program with a message: see NN_CHECK.
// Thread-safety: one thread at a time.
class Model {
 public:
  // Each layer's input is as large as the output of the one before. Up to `max_batch` rows at a time.
  // All are of `device`, which outlives the model.
  Model(std::vector<NamedLayer> layers, int max_batch, Device& device = Cpu());

  Device& device() const { return device_; }

  int input_size() const { return layers_.front().layer->input_size(); }
  int output_size() const { return layers_.back().layer->output_size(); }
  int max_batch() const { return max_batch_; }

  // In the order in which forward uses them; backward announces them in reverse.
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }

  // Every layer's, with the layer's name before each.
  const std::vector<LayerBuffer>& buffers() const { return buffers_; }

  // Whether the next Forward is one of training (so at first), or of evaluation, which no Backward follows.
  void SetTraining(bool training);

  // Where parameter i and its gradient live: borrowed, for as long as the model is used. The gradients' old contents do
  // not matter.
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads);

  // Writes every parameter as PyTorch's layers start: uniform in +-1/sqrt(fan_in), or the value that its spec names.
  // The values depend on `seed` and on the parameter's index alone. After Bind.
  void Initialize(uint64_t seed);

  // The outputs, row by row as the last layer writes them, of the samples at `x`, [rows, input_size()]. 1 <= rows <=
  // max_batch. x is borrowed until Backward; the outputs are valid until the next Forward.
  absl::Span<const float> Forward(const float* x, int rows);

  // Where the loss writes its gradient with respect to the outputs of the last Forward, row by row as they are; it has
  // room for the largest batch.
  absl::Span<float> output_grad();

  // Computes the gradients of the last Forward's rows, from the last parameter to the first, and calls grad_ready(i) as
  // soon as that of parameter i is complete. With `accumulate` they are added to what is there. Overwrites
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
  std::shared_ptr<float> grads_[2];              // of one layer's output and of its input, taking turns
};

// A multi-layer perceptron: linear layers with ReLU between them. `hidden` may be empty. Parameters have the names and
// shapes of PyTorch's nn.Sequential(Flatten, Linear, ReLU, Linear, ReLU, Linear): "1.weight" [out, in], "1.bias" [out],
// "3.weight", ...
std::unique_ptr<Model> MakeMlp(int inputs, absl::Span<const int> hidden, int outputs, int max_batch,
                               Device& device = Cpu());

// How many threads the arithmetic of models made and used by the calling thread may take. Before MakeMlp: products are
// planned for it. Left alone, it is every core that the process may run on, so that two ranks get in each other's way.
void SetThreads(int threads);

}  // namespace nn

#endif  // EXAMPLES_NN_MODEL_H_
