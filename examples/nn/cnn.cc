#include "examples/nn/cnn.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/nn/batch_norm.h"
#include "examples/nn/check.h"
#include "examples/nn/conv2d.h"
#include "examples/nn/linear.h"
#include "examples/nn/pooling.h"
#include "examples/nn/residual.h"

namespace nn {

bool HasBfloat16() { return onednn::HasBfloat16(); }

std::unique_ptr<Model> MakeLenet(const ImageShape& images, int classes, int max_batch) {
  NN_CHECK(images.height >= kLenetSmallestImage && images.width >= kLenetSmallestImage);
  const auto session = std::make_shared<onednn::Session>();
  auto first = std::make_unique<Conv2d>(
      session, Conv2dOptions{.in = images, .outputs = 32, .activation = Activation::kRelu, .in_layout = Layout::kPlain},
      max_batch);
  // Its ReLU comes after the pooling.
  auto second = std::make_unique<Conv2d>(session, Conv2dOptions{.in = first->output_shape(), .outputs = 64}, max_batch);
  auto pool = std::make_unique<Pool2d>(session, onednn::PoolKind::kMax, second->output_shape(), 2, Activation::kRelu,
                                       max_batch);
  auto flatten = std::make_unique<Flatten>(session, pool->output_shape(), max_batch);
  auto hidden = std::make_unique<Linear>(flatten->output_size(), 128, Activation::kRelu, max_batch);
  auto last = std::make_unique<Linear>(128, classes, Activation::kNone, max_batch);

  std::vector<NamedLayer> layers;
  layers.push_back({"0", std::move(first)});
  layers.push_back({"2", std::move(second)});
  layers.push_back({"4", std::move(pool)});
  layers.push_back({"5", std::move(flatten)});
  layers.push_back({"6", std::move(hidden)});
  layers.push_back({"8", std::move(last)});
  return std::make_unique<Model>(std::move(layers), max_batch);
}

std::unique_ptr<Model> MakeResnet20(const ImageShape& images, int classes, int max_batch) {
  const auto session = std::make_shared<onednn::Session>();
  std::vector<NamedLayer> layers;
  auto stem = std::make_unique<Conv2d>(
      session, Conv2dOptions{.in = images, .outputs = 16, .padding = 1, .bias = false, .in_layout = Layout::kPlain},
      max_batch);
  ImageShape shape = stem->output_shape();
  layers.push_back({"0", std::move(stem)});
  layers.push_back({"1", std::make_unique<BatchNorm2d>(session, shape, Activation::kRelu, max_batch)});
  for (const int width : {16, 32, 64}) {
    for (int block = 0; block < 3; ++block) {
      const int stride = width > 16 && block == 0 ? 2 : 1;
      auto basic = std::make_unique<BasicBlock>(session, shape, width, stride, max_batch);
      shape = basic->output_shape();
      layers.push_back({absl::StrCat(layers.size() + 1), std::move(basic)});
    }
  }
  auto pool = Pool2d::Global(session, shape, max_batch);
  auto flatten = std::make_unique<Flatten>(session, pool->output_shape(), max_batch);
  layers.push_back({"12", std::move(pool)});
  layers.push_back({"13", std::move(flatten)});
  layers.push_back({"14", std::make_unique<Linear>(shape.channels, classes, Activation::kNone, max_batch)});
  return std::make_unique<Model>(std::move(layers), max_batch);
}

}  // namespace nn
