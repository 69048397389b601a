// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cnn.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/nn/check.h"
#include "examples/nn/onednn_image.h"

namespace nn {

bool HasBfloat16() { return onednn::HasBfloat16(); }

std::unique_ptr<Model> MakeLenet(const ImageShape& images, int classes, int max_batch, Device& device) {
  NN_CHECK(images.height >= kLenetSmallestImage && images.width >= kLenetSmallestImage);
  const std::unique_ptr<ImageLayers> make = device.MakeImageLayers(max_batch);
  const Conv2dOptions first = {
      .in = images, .outputs = 32, .activation = Activation::kRelu, .in_layout = Layout::kPlain};
  const Conv2dOptions second = {.in = first.out(), .outputs = 64};  // its ReLU comes after the pooling
  const Pool2dOptions pool = {.in = second.out(), .activation = Activation::kRelu};
  const ImageShape pooled = pool.out();

  std::vector<NamedLayer> layers;
  layers.push_back({"0", make->MakeConv2d(first)});
  layers.push_back({"2", make->MakeConv2d(second)});
  layers.push_back({"4", make->MakePool2d(pool)});
  layers.push_back({"5", make->MakeFlatten(pooled)});
  const auto linear = [&](int inputs, int outputs, Activation activation) {
    return device.MakeLinear(inputs, outputs, activation, max_batch, layers.back().layer.get());
  };
  layers.push_back({"6", linear(pooled.channels * pooled.height * pooled.width, 128, Activation::kRelu)});
  layers.push_back({"8", linear(128, classes, Activation::kNone)});
  return std::make_unique<Model>(std::move(layers), max_batch, device);
}

namespace {

// The mean of each channel, and the linear layer. `first`: the number of this part's first layer.
void AddClassifier(ImageLayers& make, Device& device, const ImageShape& shape, int classes, int max_batch, int first,
                   std::vector<NamedLayer>& layers) {
  const Pool2dOptions pool = {.kind = PoolKind::kAverage, .in = shape, .height = shape.height, .width = shape.width};
  layers.push_back({absl::StrCat(first), make.MakePool2d(pool)});
  layers.push_back({absl::StrCat(first + 1), make.MakeFlatten(pool.out())});
  layers.push_back({absl::StrCat(first + 2), device.MakeLinear(shape.channels, classes, Activation::kNone, max_batch,
                                                               layers.back().layer.get())});
}

}  // namespace

std::unique_ptr<Model> MakeResnet20(const ImageShape& images, int classes, int max_batch, Device& device) {
  const std::unique_ptr<ImageLayers> make = device.MakeImageLayers(max_batch);
  const Conv2dOptions stem = {.in = images, .outputs = 16, .padding = 1, .bias = false, .in_layout = Layout::kPlain};
  ImageShape shape = stem.out();
  std::vector<NamedLayer> layers;
  layers.push_back({"0", make->MakeConv2d(stem)});
  layers.push_back({"1", make->MakeBatchNorm2d(shape, Activation::kRelu)});
  for (const int width : {16, 32, 64}) {
    for (int block = 0; block < 3; ++block) {
      const BasicBlockOptions options = {.in = shape, .outputs = width, .stride = width > 16 && block == 0 ? 2 : 1};
      layers.push_back({absl::StrCat(layers.size() + 1), make->MakeBasicBlock(options)});
      shape = options.out();
    }
  }
  AddClassifier(*make, device, shape, classes, max_batch, 12, layers);
  return std::make_unique<Model>(std::move(layers), max_batch, device);
}

std::unique_ptr<Model> MakeResnet50(const ImageShape& images, int classes, int max_batch, Device& device) {
  const std::unique_ptr<ImageLayers> make = device.MakeImageLayers(max_batch);
  const Conv2dOptions stem = {
      .in = images, .outputs = 64, .kernel = 7, .stride = 2, .padding = 3, .bias = false, .in_layout = Layout::kPlain};
  const Pool2dOptions pool = {.in = stem.out(), .height = 3, .width = 3, .stride = 2, .padding = 1};
  std::vector<NamedLayer> layers;
  layers.push_back({"0", make->MakeConv2d(stem)});
  layers.push_back({"1", make->MakeBatchNorm2d(stem.out(), Activation::kRelu)});
  layers.push_back({"3", make->MakePool2d(pool)});
  ImageShape shape = pool.out();
  struct Stage {
    int width, blocks;
  };
  for (const Stage& stage : {Stage{64, 3}, Stage{128, 4}, Stage{256, 6}, Stage{512, 3}}) {
    for (int block = 0; block < stage.blocks; ++block) {
      const BottleneckOptions options = {
          .in = shape, .width = stage.width, .stride = stage.width > 64 && block == 0 ? 2 : 1};
      layers.push_back({absl::StrCat(layers.size() + 1), make->MakeBottleneck(options)});
      shape = options.out();
    }
  }
  AddClassifier(*make, device, shape, classes, max_batch, 20, layers);
  return std::make_unique<Model>(std::move(layers), max_batch, device);
}

}  // namespace nn
