// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cpu_image_layers.h"

#include "examples/nn/batch_norm.h"
#include "examples/nn/conv2d.h"
#include "examples/nn/pooling.h"
#include "examples/nn/residual.h"

namespace nn {
namespace {

class CpuImageLayers final : public ImageLayers {
 public:
  explicit CpuImageLayers(int max_batch) : max_batch_(max_batch) {}

  std::unique_ptr<Layer> MakeConv2d(const Conv2dOptions& options) override {
    return std::make_unique<Conv2d>(session_, options, max_batch_);
  }
  std::unique_ptr<Layer> MakeBatchNorm2d(const ImageShape& shape, Activation activation) override {
    return std::make_unique<BatchNorm2d>(session_, shape, activation, max_batch_);
  }
  std::unique_ptr<Layer> MakeBasicBlock(const BasicBlockOptions& options) override {
    return std::make_unique<BasicBlock>(session_, options.in, options.outputs, options.stride, max_batch_);
  }
  std::unique_ptr<Layer> MakeBottleneck(const BottleneckOptions& options) override {
    return std::make_unique<Bottleneck>(session_, options, max_batch_);
  }
  std::unique_ptr<Layer> MakePool2d(const Pool2dOptions& options) override {
    return std::make_unique<Pool2d>(session_, options, max_batch_);
  }
  std::unique_ptr<Layer> MakeFlatten(const ImageShape& shape) override {
    return std::make_unique<Flatten>(session_, shape, max_batch_);
  }
  std::unique_ptr<Layer> MakeDropout(int size, double p, uint64_t seed) override {
    return std::make_unique<Dropout>(size, p, seed);
  }

 private:
  onednn::SessionPtr session_ = std::make_shared<onednn::Session>();
  int max_batch_;
};

}  // namespace

std::unique_ptr<ImageLayers> MakeCpuImageLayers(int max_batch) { return std::make_unique<CpuImageLayers>(max_batch); }

}  // namespace nn
