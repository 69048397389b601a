// Where a model computes: the one seam between the CPU and GPUs.
#ifndef EXAMPLES_NN_DEVICE_H_
#define EXAMPLES_NN_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "examples/nn/element.h"
#include "examples/nn/image_layers.h"
#include "examples/nn/layer.h"
#include "examples/nn/linear.h"
#include "examples/nn/loss.h"
#include "examples/nn/optimizer.h"

namespace nn {

// A GPU, or a library that it needs, is missing, or failed. The message says what to do.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Makes a model's parts for one device, and memory for them. What is made is used by way of the same interfaces
// everywhere; the pointers and spans that go through them are the device's, which the host may read on the CPU only.
//
// On a GPU everything is submitted to one stream and takes effect in its order; nothing waits but what says so. Errors
// are thrown as DeviceError. Thread-safety: one thread at a time.
class Device {
 public:
  virtual ~Device() = default;

  // "cpu" or "cuda".
  virtual std::string name() const = 0;
  // Whether the host reads and writes its memory.
  bool is_host() const { return stream() == nullptr; }
  // The GPU's stream, a cudaStream_t; null on the CPU.
  virtual void* stream() const = 0;

  // Zeroed, in the device's memory.
  virtual std::shared_ptr<float> Allocate(size_t count) = 0;
  // In the host's memory, zeroed. A GPU copies from there, and writes there, while the host goes on.
  virtual std::shared_ptr<void> AllocateHost(size_t bytes) = 0;
  // From the host's memory to the device's, asynchronously if `from` is of AllocateHost: then it must stay as it is
  // until a Wait, or an Await for a Mark behind it.
  virtual void Upload(const void* from, void* to, size_t bytes) = 0;
  // Waits, and then copies.
  virtual void Download(const void* from, void* to, size_t bytes) = 0;
  // Until everything submitted so far is done.
  virtual void Wait() = 0;
  // The same for what had been submitted when slot `mark`, one of kMarks, was last given to Mark.
  static constexpr int kMarks = 2;
  virtual void Mark(int mark) = 0;
  virtual void Await(int mark) = 0;

  // A fully connected layer. `below`: the layer made by the same device whose output is this layer's input; null for a
  // model's input, which is float32.
  virtual std::unique_ptr<Layer> MakeLinear(int inputs, int outputs, Activation activation, int max_batch,
                                            Layer* below) = 0;
  // The other layers of convolutional models.
  virtual std::unique_ptr<ImageLayers> MakeImageLayers(int max_batch) = 0;
  // Their state is in the device's memory.
  virtual std::unique_ptr<Optimizer> MakeSgd(size_t count, const SgdOptions& options) = 0;
  virtual std::unique_ptr<Optimizer> MakeAdam(size_t count, const AdamOptions& options) = 0;

  // As the functions of loss.h, of a model's outputs. What they return there they write: the loss, and the count added
  // to what is there, to host memory of AllocateHost's.
  virtual void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                            const LossOptions& options, double* loss) = 0;
  virtual void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) = 0;
};

// The host. One for all; has no state.
Device& Cpu();

struct CudaOptions {
  // Products and convolutions of float32 round their factors to 10 bits of mantissa, which is several times faster.
  bool tf32 = false;
  // What layers hand to each other, and multiply. Sums are float32 all the same, and so are parameters and their
  // gradients, those of convolutions after they were rounded to this type.
  Element activations = Element::kFloat32;
  // Convolutions take the algorithm that cuDNN holds for the fastest of those that give the same bits each time; else
  // the one that proves fastest when it is first used.
  bool deterministic = false;
};

// GPU `index` of those that this process sees. Throws DeviceError: no such GPU, no cuBLAS, a build without CUDA;
// and making image layers where there is no cuDNN.
std::unique_ptr<Device> OpenCuda(int index, const CudaOptions& options);

}  // namespace nn

#endif  // EXAMPLES_NN_DEVICE_H_
