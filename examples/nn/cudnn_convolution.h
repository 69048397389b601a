// Convolutions of native images on a GPU, by cuDNN.
#ifndef EXAMPLES_NN_CUDNN_CONVOLUTION_H_
#define EXAMPLES_NN_CUDNN_CONVOLUTION_H_

#include <cuda_runtime_api.h>

#include <compare>
#include <map>
#include <memory>

#include "examples/nn/cudnn.h"
#include "examples/nn/element.h"

namespace nn::cudnn {

// Throws DeviceError unless it is success.
void Check(cudnnStatus_t status, const char* call);

// Of images x [rows, in_height, in_width, channels] with weights [outputs, kernel, kernel, channels].
struct ConvolutionShape {
  int rows, channels, in_height, in_width, outputs, kernel, stride, padding;

  int out_height() const { return (in_height + 2 * padding - kernel) / stride + 1; }
  int out_width() const { return (in_width + 2 * padding - kernel) / stride + 1; }
  friend auto operator<=>(const ConvolutionShape&, const ConvolutionShape&) = default;
};

enum class Pass {
  kForward,          // y = x * w
  kForwardBias,      // y = x * w + bias, of one float32 for each output
  kForwardBiasRelu,  // y = max(0, x * w + bias)
  kInputGrad,        // dx from dy and w
  kWeightGrad,       // dw from x and dy
};

// Images and weights, or their gradients, as the pass reads and writes them.
struct Tensors {
  const void* x;
  const void* w;
  const void* y;
  const void* bias = nullptr;

  friend bool operator==(const Tensors&, const Tensors&) = default;
};

class Plan;  // how one pass of one shape is computed

// What the convolutions of one GPU share. Not thread-safe.
class Context {
 public:
  struct Options {
    Element element;
    bool tf32, deterministic;
  };
  Context(cudaStream_t stream, const Options& options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Null where cuDNN has no plan. Of several the one that is the fastest on these tensors, which it writes to.
  const Plan* PlanFor(Pass pass, const ConvolutionShape& shape, const Tensors& tensors);

  const Api& api;
  const Options options;
  const cudaStream_t stream;
  cudnnHandle_t handle = nullptr;
  void* workspace = nullptr;

 private:
  std::map<std::pair<Pass, ConvolutionShape>, std::unique_ptr<Plan>> plans_;
};

// One pass of one layer, planned when it runs first. cuDNN sees the same tensors again and again.
class Convolution {
 public:
  Convolution(Context& context, Pass pass, const ConvolutionShape& shape);
  ~Convolution();

  // False, and nothing is done, where cuDNN does not support it.
  bool Run(const Tensors& tensors);

 private:
  struct Bound;

  Context& context_;
  const Pass pass_;
  const ConvolutionShape shape_;
  bool planned_ = false;
  const Plan* plan_ = nullptr;
  std::unique_ptr<Bound> bound_;
};

}  // namespace nn::cudnn

#endif  // EXAMPLES_NN_CUDNN_CONVOLUTION_H_
