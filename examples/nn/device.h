// SPDX-License-Identifier: Apache-2.0
// The device on which a model computes. All differences between the CPU and GPUs are behind this interface.
#ifndef EXAMPLES_NN_DEVICE_H_
#define EXAMPLES_NN_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "absl/functional/function_ref.h"
#include "examples/nn/element.h"
#include "examples/nn/image_layers.h"
#include "examples/nn/layer.h"
#include "examples/nn/linear.h"
#include "examples/nn/loss.h"
#include "examples/nn/optimizer.h"

namespace nn {

// A GPU, or a library that it needs, is missing or has failed. The message says what to do.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Work that was captured once, and can be submitted to its device again and again.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void Launch() = 0;
};

// Creates the parts of a model for one device, and memory for them. The interfaces of these parts are the same on all
// devices. Their pointers and spans refer to the device's memory, which the host can read only if the device is the
// CPU.
//
// On a GPU, all work is submitted to one stream and runs in this order. A function waits only if its comment says so.
// Errors are thrown as DeviceError. Thread-safety: one thread at a time.
// Measures time on a device, which may be behind the host.
class Timer {
 public:
  static constexpr int64_t kMarks = 8;

  virtual ~Timer() = default;
  // Notes the moment at which all work submitted so far is done, as moment n. The last kMarks moments are kept.
  virtual void Mark(int64_t n) = 0;
  // Waits for moment n, and returns the nanoseconds from moment n - 1 to it.
  virtual int64_t NsToMark(int64_t n) = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  // "cpu" or "cuda".
  virtual std::string name() const = 0;
  // True if the host can read and write the device's memory.
  bool is_host() const { return stream() == nullptr; }
  // The GPU's stream, a cudaStream_t; null on the CPU.
  virtual void* stream() const = 0;

  // Allocates zeroed memory on the device.
  virtual std::shared_ptr<float> Allocate(size_t count) = 0;
  // Allocates zeroed memory on the host, which a GPU can read and write while the host continues.
  virtual std::shared_ptr<void> AllocateHost(size_t bytes) = 0;
  // Copies from the host to the device. Asynchronous if `from` is from AllocateHost: do not change it before a Wait.
  virtual void Upload(const void* from, void* to, size_t bytes) = 0;
  // Waits, then copies from the device to the host.
  virtual void Download(const void* from, void* to, size_t bytes) = 0;
  // Waits until all work submitted so far is done.
  virtual void Wait() = 0;

  // Uploads to the kSlots pieces of memory that a program uses in turn, while the device computes on another slot:
  // UploadTo copies as soon as the work that had been submitted at the last Release(slot) is done, and work that is
  // submitted later waits for the copy. Await(slot) waits on the host for the last copy: only then change `from`, which
  // is from AllocateHost.
  static constexpr int kSlots = 2;
  virtual void UploadTo(int slot, const void* from, void* to, size_t bytes) = 0;
  virtual void Release(int slot) = 0;
  virtual void Await(int slot) = 0;

  virtual std::unique_ptr<Timer> MakeTimer() = 0;

  // Returns as a graph what `submit` submits to the stream, and to streams that it makes wait for it; nothing of it
  // runs. `submit` must not wait or allocate: whatever it calls has to have run before, with the same sizes. Null if
  // `submit` returns false. Only for GPUs.
  virtual std::unique_ptr<Graph> Capture(absl::FunctionRef<bool()> submit) = 0;

  // Creates a fully connected layer. `below`: the layer of the same device whose output is this layer's input; null if
  // the input is the model's input, which is float32.
  virtual std::unique_ptr<Layer> MakeLinear(int inputs, int outputs, Activation activation, int max_batch,
                                            Layer* below) = 0;
  // Creates the other layers of convolutional models.
  virtual std::unique_ptr<ImageLayers> MakeImageLayers(int max_batch) = 0;
  // Create optimizers whose state is in the device's memory.
  virtual std::unique_ptr<Optimizer> MakeSgd(size_t count, const SgdOptions& options) = 0;
  virtual std::unique_ptr<Optimizer> MakeAdam(size_t count, const AdamOptions& options) = 0;

  // Like the functions of loss.h, for a model's outputs. They write their results to memory from AllocateHost: the loss
  // is stored, the count is added.
  virtual void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                            const LossOptions& options, const LossRing& loss) = 0;
  virtual void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) = 0;

  // Measures the floating-point operations per second of a large matrix product, on the CPU the best of two sizes, with
  // the threads and the type that layers use: on the CPU bfloat16 if `bfloat16`. Takes a few tenths of a second. 0:
  // there is not enough memory.
  virtual double ProductRate(bool bfloat16) = 0;

  // y = (x + y) * scale. On a GPU submitted to `stream`, a cudaStream_t, instead of the device's own.
  virtual void AddScaled(const float* x, float* y, size_t count, float scale, void* stream) = 0;
};

// The CPU. There is one object without state.
Device& Cpu();

struct CudaOptions {
  // Rounds the factors of float32 products and convolutions to 10 bits of mantissa, which is several times faster.
  bool tf32 = false;
  // The type of activations and of the factors of products. Sums, parameters and gradients are float32. The gradients
  // of convolutions are first rounded to this type.
  Element activations = Element::kFloat32;
  // true: convolutions use the algorithm that cuDNN expects to be the fastest of those that give the same bits each
  // time. false: they use the one that is fastest in a trial at its first use.
  bool deterministic = false;
  // Where the results of such trials are remembered for the next run (see plan_cache.h). Empty: nowhere.
  std::string plan_file = {};
  // Other processes compute on this GPU. Then there are no kernels whose thread blocks wait for each other, which would
  // have to run at the same time.
  bool shared = false;
};

// Opens GPU `index` of those that this process sees. Throws DeviceError if there is no such GPU, no cuBLAS, or if the
// build has no CUDA. Creating image layers throws it if there is no cuDNN.
std::unique_ptr<Device> OpenCuda(int index, const CudaOptions& options);

}  // namespace nn

#endif  // EXAMPLES_NN_DEVICE_H_
