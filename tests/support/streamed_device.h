// SPDX-License-Identifier: Apache-2.0
// The example layers on a simulated GPU: they compute as on the CPU, in the order of a stream, so that their steps can
// be captured.
#ifndef TESTS_SUPPORT_STREAMED_DEVICE_H_
#define TESTS_SUPPORT_STREAMED_DEVICE_H_

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "examples/nn/device.h"
#include "tests/support/fake_devices.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing {

class StreamedLayer final : public nn::Layer {
 public:
  StreamedLayer(std::unique_ptr<nn::Layer> inner, void* stream) : inner_(std::move(inner)), stream_(stream) {}
  int input_size() const override { return inner_->input_size(); }
  int output_size() const override { return inner_->output_size(); }
  absl::Span<const nn::ParameterSpec> parameters() const override { return inner_->parameters(); }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) override { inner_->Bind(values, grads); }
  void SetTraining(bool training) override {
    FakeDevices::Enqueue(stream_, [=, this] { inner_->SetTraining(training); });
  }
  void Forward(const float* x, float* y, int rows) override {
    FakeDevices::Enqueue(stream_, [=, this] { inner_->Forward(x, y, rows); });
  }
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                nn::GradReadyFn grad_ready) override {
    FakeDevices::Enqueue(stream_, [=, this] { inner_->Backward(x, y, dy, dx, rows, accumulate, [](size_t) {}); });
    for (size_t i = parameters().size(); i-- > 0;) grad_ready(i);
  }

 private:
  const std::unique_ptr<nn::Layer> inner_;
  void* const stream_;
};

// Reads its words when it runs, and keeps its learning rate where it runs.
class StreamedOptimizer final : public nn::Optimizer {
 public:
  StreamedOptimizer(std::unique_ptr<nn::Optimizer> inner, void* stream)
      : inner_(std::move(inner)), stream_(stream), lr_(inner_->lr()) {}
  void Step(absl::Span<float> value, absl::Span<const float> grad) override {
    FakeDevices::Enqueue(stream_, [=, this, words = words_] {
      for (const uint32_t* skip : {words.found_inf, words.skip_step}) {
        if (skip != nullptr && *skip != 0) return;
      }
      inner_->set_clip_norm(clip_norm_);
      inner_->set_grad_scale(words.inv_scale == nullptr ? 1 : *words.inv_scale);
      inner_->Step(value, grad);
    });
  }
  std::vector<nn::NamedState> state() override { return inner_->state(); }
  double lr() const override { return lr_; }
  void set_lr(double lr) override {
    lr_ = lr;
    FakeDevices::Enqueue(stream_, [=, this] { inner_->set_lr(lr); });
  }
  int64_t steps() override {
    FakeDevices::Synchronize(stream_);
    return inner_->steps();
  }
  void set_steps(int64_t steps) override {
    FakeDevices::Synchronize(stream_);
    inner_->set_steps(steps);
  }

 private:
  const std::unique_ptr<nn::Optimizer> inner_;
  void* const stream_;
  double lr_;
};

// Fully connected layers, both optimizers and the loss. Its memory is the host's: FakeDevices::host_memory_is_theirs.
class StreamedDevice : public ForwardingDevice {
 public:
  explicit StreamedDevice(simulated::Rank& rank)
      : rank_(rank), owned_(rank.MakeStream()), uploads_(rank.MakeStream()), stream_(owned_.get()) {
    const DeviceGuard guard(rank.gpus, rank.device());
    for (int slot = 0; slot < kSlots; ++slot) {
      arrived_[slot] = RANK_VALUE(MakeEvent(rank.gpus));
      released_[slot] = RANK_VALUE(MakeEvent(rank.gpus));
    }
  }
  // How many graphs were launched. Launch `number`, counted from 0, fails.
  int launches() const { return launches_; }
  void FailLaunch(int number) { fails_ = number; }

  std::string name() const override { return "simulated"; }
  void* stream() const override { return stream_; }
  void Upload(const void* from, void* to, size_t bytes) override {
    Wait();
    std::memcpy(to, from, bytes);
  }
  void Download(const void* from, void* to, size_t bytes) override {
    Wait();
    std::memcpy(to, from, bytes);
  }
  void Wait() override { FakeDevices::Synchronize(stream_); }
  void UploadTo(int slot, const void* from, void* to, size_t bytes) override {
    const DeviceGuard guard(rank_.gpus, rank_.device());
    RANK_CHECK_OK(rank_.gpus.WaitEvent(uploads_.get(), released_[slot].get()));
    FakeDevices::Enqueue(uploads_.get(), [=] { std::memcpy(to, from, bytes); });
    RANK_CHECK_OK(rank_.gpus.Record(arrived_[slot].get(), uploads_.get()));
    RANK_CHECK_OK(rank_.gpus.WaitEvent(stream_, arrived_[slot].get()));
  }
  void Release(int slot) override {
    const DeviceGuard guard(rank_.gpus, rank_.device());
    RANK_CHECK_OK(rank_.gpus.Record(released_[slot].get(), stream_));
  }
  void Await(int slot) override {
    while (!RANK_VALUE(rank_.gpus.Finished(arrived_[slot].get()))) std::this_thread::yield();
  }
  std::unique_ptr<nn::Graph> Capture(absl::FunctionRef<bool()> submit) override {
    RANK_CHECK_OK(FakeDevices::BeginCapture(stream_));
    const bool complete = submit();
    const absl::StatusOr<std::shared_ptr<FakeGraph>> graph = FakeDevices::EndCapture(stream_);
    if (!complete) return nullptr;
    RANK_CHECK_OK(graph.status());
    return std::make_unique<Captured>(*this, *graph);
  }
  std::unique_ptr<nn::Layer> MakeLinear(int inputs, int outputs, nn::Activation activation, int max_batch,
                                        nn::Layer*) override {
    return std::make_unique<StreamedLayer>(nn::Cpu().MakeLinear(inputs, outputs, activation, max_batch, nullptr),
                                           stream_);
  }
  std::unique_ptr<nn::Optimizer> MakeSgd(size_t count, const nn::SgdOptions& options) override {
    return std::make_unique<StreamedOptimizer>(nn::Cpu().MakeSgd(count, options), stream_);
  }
  std::unique_ptr<nn::Optimizer> MakeAdam(size_t count, const nn::AdamOptions& options) override {
    return std::make_unique<StreamedOptimizer>(nn::Cpu().MakeAdam(count, options), stream_);
  }
  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const nn::LossOptions& options, const nn::LossRing& loss) override {
    FakeDevices::Enqueue(stream_,
                         [=] { nn::Cpu().CrossEntropy(logits, labels, rows, classes, dlogits, options, loss); });
  }
  void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) override {
    FakeDevices::Enqueue(stream_, [=] { nn::Cpu().CountHits(logits, labels, rows, classes, hits); });
  }
  void AddScaled(const float* x, float* y, size_t count, float scale, void* stream) override {
    FakeDevices::Enqueue(stream, [=] { nn::Cpu().AddScaled(x, y, count, scale, nullptr); });
  }

 private:
  class Captured final : public nn::Graph {
   public:
    Captured(StreamedDevice& device, std::shared_ptr<FakeGraph> graph) : device_(device), graph_(std::move(graph)) {}
    void Launch() override {
      if (device_.launches_++ == device_.fails_) throw nn::DeviceError("the GPU has fallen off the bus");
      FakeDevices::Launch(graph_, device_.stream_);
    }

   private:
    StreamedDevice& device_;
    const std::shared_ptr<FakeGraph> graph_;
  };

  simulated::Rank& rank_;
  const OwnedStream owned_, uploads_;
  void* const stream_;
  OwnedEvent arrived_[kSlots], released_[kSlots];
  int launches_ = 0, fails_ = -1;
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_STREAMED_DEVICE_H_
