// SPDX-License-Identifier: Apache-2.0
// Convolutions of native images on a GPU, by cuDNN.
#ifndef EXAMPLES_NN_CUDNN_CONVOLUTION_H_
#define EXAMPLES_NN_CUDNN_CONVOLUTION_H_

#include <cuda_runtime_api.h>

#include <compare>
#include <map>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "examples/nn/cudnn.h"
#include "examples/nn/element.h"
#include "examples/nn/plan_cache.h"

namespace nn::cudnn {

// Throws DeviceError if the call has failed.
void Check(cudnnStatus_t status, const char* call);

// The shape of a convolution: images x [rows, in_height, in_width, channels], weights [outputs, kernel, kernel,
// channels].
struct ConvolutionShape {
  int rows, channels, in_height, in_width, outputs, kernel, stride, padding;

  int out_height() const { return (in_height + 2 * padding - kernel) / stride + 1; }
  int out_width() const { return (in_width + 2 * padding - kernel) / stride + 1; }
  friend auto operator<=>(const ConvolutionShape&, const ConvolutionShape&) = default;
};

enum class Pass {
  kForward,          // y = x * w
  kForwardSums,      // the same, and for each output the sums of y and of its square
  kForwardBias,      // y = x * w + bias; bias has one float32 per output
  kForwardBiasRelu,  // y = max(0, x * w + bias)
  kInputGrad,        // dx from dy and w
  kInputGradAdded,   // the same, and an image of dx's shape added to it
  kWeightGrad,       // dw from x and dy
};

// The images and weights, or their gradients, that a pass reads and writes.
struct Tensors {
  const void* x;
  const void* w;
  const void* y;
  const void* added = nullptr;  // the bias, or what is added to dx
  const void* sums = nullptr;   // float32, one per output
  const void* squares = nullptr;

  friend bool operator==(const Tensors&, const Tensors&) = default;
};

class Plan;  // the way to compute one pass of one shape

// The state that all convolutions of one GPU share. Not thread-safe.
class Context {
 public:
  struct Options {
    Element element;
    bool tf32, deterministic;
    std::string plan_file;  // of a PlanCache
  };
  Context(cudaStream_t stream, const Options& options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Returns the plan that is the fastest on these tensors, to which trials write, or was so in an earlier run on such a
  // GPU. Null if cuDNN has no plan.
  const Plan* PlanFor(Pass pass, const ConvolutionShape& shape, const Tensors& tensors);

  // Whether together(), which does the same as apart(), is faster, by trials or an earlier run's. No with
  // `deterministic`, and where together() returns false, since it is not supported. `pass` and `shape` tell what is
  // done.
  bool IsFaster(Pass pass, const ConvolutionShape& shape, absl::FunctionRef<bool()> together,
                absl::FunctionRef<void()> apart);

  const Api& api;
  const Options options;
  const cudaStream_t stream;
  cudnnHandle_t handle = nullptr;
  void* workspace = nullptr;

 private:
  PlanCache remembered_;
  const std::string gpu_;  // all that a choice depends on beside pass and shape
  std::map<std::pair<Pass, ConvolutionShape>, std::unique_ptr<Plan>> plans_;
};

// One pass of one layer. It is planned at the first run. Later runs use the same tensors.
class Convolution {
 public:
  Convolution(Context& context, Pass pass, const ConvolutionShape& shape);
  ~Convolution();

  // Returns false, and does nothing, if cuDNN does not support it.
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
