// SPDX-License-Identifier: Apache-2.0
// Linked with a trainer, and with simulated_gpus.cc: its --device=cuda is a simulated GPU. The processor computes,
// after the stream has done what it was given by then.
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "libddp/device/device_runtime.h"
#include "tests/support/fake_devices.h"
#include "tests/support/forwarding_device.h"

namespace nn {
namespace {

using ddp::testing::FakeDevices;

class SimulatedLayer final : public Layer {
 public:
  SimulatedLayer(std::unique_ptr<Layer> layer, void* stream) : layer_(std::move(layer)), stream_(stream) {}
  int input_size() const override { return layer_->input_size(); }
  int output_size() const override { return layer_->output_size(); }
  absl::Span<const ParameterSpec> parameters() const override { return layer_->parameters(); }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) override { layer_->Bind(values, grads); }
  void Forward(const float* x, float* y, int rows) override {
    FakeDevices::Synchronize(stream_);
    layer_->Forward(x, y, rows);
  }
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override {
    FakeDevices::Synchronize(stream_);
    layer_->Backward(x, y, dy, dx, rows, accumulate, grad_ready);
  }
  Layer& layer() { return *layer_; }

 private:
  const std::unique_ptr<Layer> layer_;
  void* const stream_;
};

class SimulatedSgd final : public Optimizer {
 public:
  SimulatedSgd(size_t count, const SgdOptions& options, void* stream) : sgd_(count, options), stream_(stream) {}
  void Step(absl::Span<float> value, absl::Span<const float> grad) override {
    FakeDevices::Synchronize(stream_);
    for (const uint32_t* skip : {words_.found_inf, words_.skip_step}) {
      if (skip != nullptr && *skip != 0) return;
    }
    sgd_.set_grad_scale(words_.inv_scale == nullptr ? grad_scale_ : *words_.inv_scale);
    sgd_.set_clip_norm(clip_norm_);
    sgd_.Step(value, grad);
  }
  std::vector<NamedState> state() override { return sgd_.state(); }
  double lr() const override { return sgd_.lr(); }
  void set_lr(double lr) override { sgd_.set_lr(lr); }
  int64_t steps() override { return sgd_.steps(); }
  void set_steps(int64_t steps) override { sgd_.set_steps(steps); }

 private:
  Sgd sgd_;
  void* const stream_;
};

class SimulatedGpu final : public ddp::testing::ForwardingDevice {
 public:
  explicit SimulatedGpu(ddp::OwnedStream stream) : stream_(std::move(stream)) {}
  std::string name() const override { return "cuda"; }
  void* stream() const override { return stream_.get(); }
  void Upload(const void* from, void* to, size_t bytes) override {
    Wait();
    std::memcpy(to, from, bytes);
  }
  void Download(const void* from, void* to, size_t bytes) override { Upload(from, to, bytes); }
  void Wait() override { FakeDevices::Synchronize(stream_.get()); }
  void Await(int) override { Wait(); }
  std::unique_ptr<Layer> MakeLinear(int inputs, int outputs, Activation activation, int max_batch,
                                    Layer* below) override {
    if (below != nullptr) below = &static_cast<SimulatedLayer*>(below)->layer();
    return std::make_unique<SimulatedLayer>(Cpu().MakeLinear(inputs, outputs, activation, max_batch, below),
                                            stream_.get());
  }
  std::unique_ptr<Optimizer> MakeSgd(size_t count, const SgdOptions& options) override {
    return std::make_unique<SimulatedSgd>(count, options, stream_.get());
  }
  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const LossOptions& options, const LossRing& loss) override {
    Wait();
    ForwardingDevice::CrossEntropy(logits, labels, rows, classes, dlogits, options, loss);
  }
  void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) override {
    Wait();
    ForwardingDevice::CountHits(logits, labels, rows, classes, hits);
  }

 private:
  const ddp::OwnedStream stream_;
};

}  // namespace

// In place of the library's.
std::unique_ptr<Device> OpenCuda(int index, const CudaOptions&) {
  ddp::DeviceRuntime& gpus = ddp::Devices();
  absl::Status status = gpus.SetCurrent({ddp::Device::Kind::kCuda, static_cast<int16_t>(index)});
  absl::StatusOr<ddp::OwnedStream> stream = MakeStream(gpus);
  status.Update(stream.status());
  if (!status.ok()) throw DeviceError(std::string(status.message()));
  return std::make_unique<SimulatedGpu>(*std::move(stream));
}

}  // namespace nn
