// SPDX-License-Identifier: Apache-2.0
// A device of the example layers that hands every call on to the CPU: what a test changes, it overrides.
#ifndef TESTS_SUPPORT_FORWARDING_DEVICE_H_
#define TESTS_SUPPORT_FORWARDING_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "examples/nn/device.h"

namespace ddp::testing {

class ForwardingDevice : public nn::Device {
 public:
  std::shared_ptr<float> Allocate(size_t count) override { return nn::Cpu().Allocate(count); }
  std::shared_ptr<void> AllocateHost(size_t bytes) override { return nn::Cpu().AllocateHost(bytes); }
  void Upload(const void* from, void* to, size_t bytes) override { nn::Cpu().Upload(from, to, bytes); }
  void Download(const void* from, void* to, size_t bytes) override { nn::Cpu().Download(from, to, bytes); }
  void Wait() override {}
  void UploadTo(int, const void* from, void* to, size_t bytes) override { Upload(from, to, bytes); }
  void Release(int) override {}
  void Await(int) override {}
  std::unique_ptr<nn::Timer> MakeTimer() override { return nn::Cpu().MakeTimer(); }
  std::unique_ptr<nn::Graph> Capture(absl::FunctionRef<bool()> submit) override { return nn::Cpu().Capture(submit); }
  std::unique_ptr<nn::Layer> MakeLinear(int inputs, int outputs, nn::Activation activation, int max_batch,
                                        nn::Layer* below) override {
    return nn::Cpu().MakeLinear(inputs, outputs, activation, max_batch, below);
  }
  std::unique_ptr<nn::ImageLayers> MakeImageLayers(int max_batch) override {
    return nn::Cpu().MakeImageLayers(max_batch);
  }
  std::unique_ptr<nn::Optimizer> MakeSgd(size_t count, const nn::SgdOptions& options) override {
    return nn::Cpu().MakeSgd(count, options);
  }
  std::unique_ptr<nn::Optimizer> MakeAdam(size_t count, const nn::AdamOptions& options) override {
    return nn::Cpu().MakeAdam(count, options);
  }
  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const nn::LossOptions& options, const nn::LossRing& loss) override {
    nn::Cpu().CrossEntropy(logits, labels, rows, classes, dlogits, options, loss);
  }
  void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) override {
    nn::Cpu().CountHits(logits, labels, rows, classes, hits);
  }
  double ProductRate(bool bfloat16) override { return nn::Cpu().ProductRate(bfloat16); }
  void AddScaled(const float* x, float* y, size_t count, float scale, void* stream) override {
    nn::Cpu().AddScaled(x, y, count, scale, stream);
  }
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FORWARDING_DEVICE_H_
