// SPDX-License-Identifier: Apache-2.0
#include "tests/support/nan_cases.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ddp/autocast.h"
#include "examples/nn/cnn.h"
#include "examples/nn/model.h"
#include "tests/support/catch.h"
#include "tests/support/numbers.h"

namespace nn::testing {
namespace {

using Floats = std::vector<float>;

constexpr int kRows = 3;

Floats RandomFloats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Floats floats(count);
  for (float& x : floats) x = static_cast<float>(random() * 0x1p-31 - 1);
  return floats;
}

size_t CountNan(const Floats& floats) {
  return static_cast<size_t>(std::count_if(floats.begin(), floats.end(), [](float x) { return std::isnan(x); }));
}

struct Numbers {
  Element element = Element::kFloat32;  // the activations'
  bool autocast = false;                // to bfloat16, on the CPU
};

// Of a scope for each forward pass: a cast weight is kept as long as a scope lives.
ddp::DType ProductsOf(bool autocast) { return autocast ? ddp::DType::kBFloat16 : ddp::DType::kFloat32; }

// A layer, its parameters and its activations in the device's memory, and as floats in the host's.
class Subject {
 public:
  Subject(Device& device, const Numbers& numbers, Layer& layer, bool first)
      : device_(device),
        layer_(layer),
        out_(TypeOf(numbers.element)),
        in_(first ? ddp::DType::kFloat32 : out_),
        first_(first),
        autocast_(numbers.autocast) {
    std::vector<float*> values, grads;
    for (const ParameterSpec& spec : layer.parameters()) {
      parameters.push_back(RandomFloats(spec.count(), static_cast<uint32_t>(10 + parameters.size())));
      values_.push_back(device.Allocate(spec.count()));
      grads_.push_back(device.Allocate(spec.count()));
      values.push_back(values_.back().get());
      grads.push_back(grads_.back().get());
    }
    layer.Bind(values, grads);
    x = RandomFloats(Count(layer.input_size(), in_), 1);
    dy = RandomFloats(Count(layer.output_size(), out_), 2);
    x_ = device.Allocate(Room(layer.input_size()));
    y_ = device.Allocate(Room(layer.output_size()));
    dy_ = device.Allocate(Room(layer.output_size()));
    dx_ = device.Allocate(Room(layer.input_size()));
  }

  Floats Forward() {
    for (size_t p = 0; p < parameters.size(); ++p) {
      device_.Upload(parameters[p].data(), values_[p].get(), parameters[p].size() * sizeof(float));
    }
    Upload(x, in_, x_.get());
    device_.Wait();
    const ddp::Autocast scope(ddp::Device::Kind::kCpu, ProductsOf(autocast_));
    layer_.Forward(x_.get(), y_.get(), kRows);
    return Download(y_.get(), dy.size(), out_);
  }

  // The gradients of the parameters, and by the input unless that is the model's.
  std::vector<Floats> Backward() {
    Upload(dy, out_, dy_.get());
    device_.Wait();
    layer_.Backward(x_.get(), y_.get(), dy_.get(), first_ ? nullptr : dx_.get(), kRows, false, [](size_t) {});
    std::vector<Floats> results;
    for (size_t p = 0; p < parameters.size(); ++p) {
      results.push_back(Download(grads_[p].get(), parameters[p].size(), ddp::DType::kFloat32));
    }
    if (!first_) results.push_back(Download(dx_.get(), x.size(), in_));
    return results;
  }

  Layer& layer() { return layer_; }

  Floats x, dy;
  std::vector<Floats> parameters;

 private:
  static ddp::DType TypeOf(Element element) {
    return NameOf(element, ddp::DType::kFloat32, ddp::DType::kFloat16, ddp::DType::kBFloat16);
  }
  static size_t Room(int floats) { return static_cast<size_t>(kRows) * static_cast<size_t>(floats); }
  static size_t Count(int floats, ddp::DType type) { return Room(floats) * sizeof(float) / SizeOf(type); }

  void Upload(const Floats& floats, ddp::DType type, float* to) {
    std::vector<char> bytes(floats.size() * SizeOf(type));
    for (size_t i = 0; i < floats.size(); ++i) ddp::testing::SetElement(type, bytes.data(), i, floats[i]);
    device_.Upload(bytes.data(), to, bytes.size());
  }
  Floats Download(const float* from, size_t count, ddp::DType type) {
    std::vector<char> bytes(count * SizeOf(type));
    device_.Download(from, bytes.data(), bytes.size());
    Floats floats(count);
    for (size_t i = 0; i < count; ++i) {
      floats[i] = static_cast<float>(ddp::testing::GetElement(type, bytes.data(), i));
    }
    return floats;
  }

  Device& device_;
  Layer& layer_;
  const ddp::DType out_, in_;
  const bool first_, autocast_;
  std::vector<std::shared_ptr<float>> values_, grads_;
  std::shared_ptr<float> x_, y_, dy_, dx_;
};

// The number at `at` is a NaN while this lives.
class Planted {
 public:
  explicit Planted(float& at) : at_(at), before_(at) { at = NAN; }
  ~Planted() { at_ = before_; }
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;

 private:
  float& at_;
  const float before_;
};

void CheckForward(Subject& subject) {
  REQUIRE(CountNan(subject.Forward()) == 0);
  for (size_t i = 0; i < subject.x.size() / kRows; ++i) {  // every number of one sample
    const Planted planted(subject.x[i]);
    INFO("input " << i);
    REQUIRE(CountNan(subject.Forward()) > 0);
  }
  for (size_t p = 0; p < subject.parameters.size(); ++p) {
    for (const size_t i : {size_t{0}, subject.parameters[p].size() - 1}) {
      const Planted planted(subject.parameters[p][i]);
      INFO(subject.layer().parameters()[p].name << " " << i);
      REQUIRE(CountNan(subject.Forward()) > 0);
    }
  }
}

void CheckBuffers(Device& device, Subject& subject) {
  for (const LayerBuffer& buffer : subject.layer().buffers()) {
    INFO(buffer.name);
    Floats values(buffer.data.size());
    device.Download(buffer.data.data(), values.data(), values.size() * sizeof(float));
    for (const size_t i : {size_t{0}, values.size() - 1}) {
      Floats with_nan = values;
      with_nan[i] = NAN;
      device.Upload(with_nan.data(), buffer.data.data(), values.size() * sizeof(float));
      device.Wait();
      REQUIRE(CountNan(subject.Forward()) > 0);
    }
    device.Upload(values.data(), buffer.data.data(), values.size() * sizeof(float));
    device.Wait();
  }
}

// Where the output is above 0, its gradient counts with every activation.
void CheckBackward(Subject& subject) {
  const Floats y = subject.Forward();
  for (const Floats& gradient : subject.Backward()) REQUIRE(CountNan(gradient) == 0);
  size_t tried = 0;
  for (size_t i = 0; i < y.size() / kRows; ++i) {
    if (!(y[i] > 0)) continue;
    ++tried;
    const Planted planted(subject.dy[i]);
    INFO("gradient of output " << i);
    for (const Floats& gradient : subject.Backward()) REQUIRE(CountNan(gradient) > 0);
  }
  REQUIRE(tried > 0);
  {
    const Planted planted(subject.x[0]);
    subject.Forward();
    for (size_t p = 0; p < subject.parameters.size(); ++p) {
      if (subject.layer().parameters()[p].name.find("weight") == std::string::npos) continue;
      INFO("a NaN in the input, gradient of " << subject.layer().parameters()[p].name);
      REQUIRE(CountNan(subject.Backward()[p]) > 0);
    }
  }
  for (size_t p = 0; p < subject.parameters.size(); ++p) {
    if (subject.layer().parameters()[p].name.find("weight") == std::string::npos) continue;
    const Planted planted(subject.parameters[p][0]);
    subject.Forward();
    INFO("a NaN in " << subject.layer().parameters()[p].name << ", gradients");
    const std::vector<Floats> gradients = subject.Backward();
    if (gradients.size() > subject.parameters.size()) REQUIRE(CountNan(gradients.back()) > 0);
  }
}

struct LayerCase {
  const char* name;
  bool first;  // takes a model's input
  std::function<std::unique_ptr<Layer>()> make;
};

// Of shapes that fill blocks of channels and windows: every number counts.
std::vector<LayerCase> LayerCases(Device& device, ImageLayers& make) {
  const ImageShape images = {16, 4, 6}, wide = {32, 4, 4}, plain = {3, 5, 4};
  const int floats = static_cast<int>(Pixels(1, images)) * images.channels;
  constexpr auto kRelu = Activation::kRelu;
  const auto linear = [&](int inputs, int outputs, Activation activation) {
    return [=, &device] { return device.MakeLinear(inputs, outputs, activation, kRows, nullptr); };
  };
  const auto conv = [&](const Conv2dOptions& options) { return [=, &make] { return make.MakeConv2d(options); }; };
  const auto norm = [&](Activation activation) {
    return [=, &make] { return make.MakeBatchNorm2d(images, activation); };
  };
  const auto block = [&](int outputs, int stride) {
    return [=, &make] { return make.MakeBasicBlock({.in = images, .outputs = outputs, .stride = stride}); };
  };
  const auto bottleneck = [&](const ImageShape& in, int stride) {
    return [=, &make] { return make.MakeBottleneck({.in = in, .width = 16, .stride = stride}); };
  };
  const auto pool = [&](PoolKind kind, int height, int width, Activation activation) {
    return [=, &make] {
      return make.MakePool2d({.kind = kind, .in = images, .height = height, .width = width, .activation = activation});
    };
  };
  const auto overlapping = [&](Activation activation) {
    const Pool2dOptions options = {
        .in = images, .height = 3, .width = 3, .activation = activation, .stride = 2, .padding = 1};
    return [=, &make] { return make.MakePool2d(options); };
  };
  return {
      {"linear", true, linear(24, 40, Activation::kNone)},
      {"linear, ReLU", true, linear(24, 40, kRelu)},
      {"linear, ReLU, wide", true, linear(128, 256, kRelu)},
      {"convolution of plain images, ReLU", true,
       conv({.in = plain, .outputs = 16, .padding = 1, .activation = kRelu, .in_layout = Layout::kPlain})},
      {"convolution", false, conv({.in = images, .outputs = 16, .padding = 1, .bias = false})},
      {"convolution, ReLU", false, conv({.in = images, .outputs = 32, .padding = 1, .activation = kRelu})},
      {"convolution of many channels", false, conv({.in = wide, .outputs = 32, .padding = 1, .bias = false})},
      {"convolution of many channels, ReLU", false,
       conv({.in = wide, .outputs = 32, .padding = 1, .activation = kRelu})},
      {"convolution of lines of eight pixels, ReLU", false,
       conv({.in = {16, 2, 8}, .outputs = 16, .padding = 1, .activation = kRelu})},
      {"batch norm", false, norm(Activation::kNone)},
      {"batch norm, ReLU", false, norm(kRelu)},
      {"basic block", false, block(16, 1)},
      {"basic block, stride, more channels", false, block(32, 2)},
      {"bottleneck", false, bottleneck({64, 4, 3}, 1)},
      {"bottleneck, projection", false, bottleneck(images, 1)},
      {"bottleneck, projection, stride", false, bottleneck(images, 2)},
      {"max pooling", false, pool(PoolKind::kMax, 2, 2, Activation::kNone)},
      {"max pooling, ReLU", false, pool(PoolKind::kMax, 2, 2, kRelu)},
      {"max pooling, ReLU, other windows", false, pool(PoolKind::kMax, 4, 3, kRelu)},
      {"max pooling, overlapping windows", false, overlapping(Activation::kNone)},
      {"max pooling, overlapping windows, ReLU", false, overlapping(kRelu)},
      {"average pooling", false, pool(PoolKind::kAverage, 2, 2, Activation::kNone)},
      {"average pooling, ReLU", false, pool(PoolKind::kAverage, 4, 6, kRelu)},
      {"flatten", false, [=, &make] { return make.MakeFlatten(images); }},
      {"dropout", false, [=, &make] { return make.MakeDropout(floats, 0.5, 7); }},
  };
}

void CheckLayers(Device& device, const Numbers& numbers) {
  const std::unique_ptr<ImageLayers> make = device.MakeImageLayers(kRows);
  for (const LayerCase& c : LayerCases(device, *make)) {
    INFO(c.name);
    const std::unique_ptr<Layer> layer = c.make();
    Subject subject(device, numbers, *layer, c.first);
    layer->SetTraining(false);
    CheckForward(subject);
    CheckBuffers(device, subject);
    layer->SetTraining(true);
    CheckForward(subject);
    CheckBackward(subject);
  }
}

// The layers of ResNet-50, but fewer and smaller.
std::unique_ptr<Model> MakeBottlenecks(const ImageShape& images, int classes, Device& device) {
  const std::unique_ptr<ImageLayers> make = device.MakeImageLayers(kRows);
  const Conv2dOptions stem = {
      .in = images, .outputs = 16, .kernel = 7, .stride = 2, .padding = 3, .bias = false, .in_layout = Layout::kPlain};
  const Pool2dOptions max = {.in = stem.out(), .height = 3, .width = 3, .stride = 2, .padding = 1};
  const BottleneckOptions first = {.in = max.out(), .width = 16}, second = {.in = first.out(), .width = 16},
                          third = {.in = first.out(), .width = 16, .stride = 2};
  const Pool2dOptions average = {
      .kind = PoolKind::kAverage, .in = third.out(), .height = third.out().height, .width = third.out().width};
  std::vector<NamedLayer> layers;
  layers.push_back({"0", make->MakeConv2d(stem)});
  layers.push_back({"1", make->MakeBatchNorm2d(stem.out(), Activation::kRelu)});
  layers.push_back({"3", make->MakePool2d(max)});
  layers.push_back({"4", make->MakeBottleneck(first)});
  layers.push_back({"5", make->MakeBottleneck(second)});
  layers.push_back({"6", make->MakeBottleneck(third)});
  layers.push_back({"7", make->MakePool2d(average)});
  layers.push_back({"8", make->MakeFlatten(average.out())});
  layers.push_back(
      {"9", device.MakeLinear(average.out().channels, classes, Activation::kNone, kRows, layers.back().layer.get())});
  return std::make_unique<Model>(std::move(layers), kRows, device);
}

void CheckModels(Device& device, bool autocast) {
  const ImageShape images = {3, 12, 12};
  const std::function<std::unique_ptr<Model>()> makers[] = {
      [&] {
        return MakeMlp(static_cast<int>(Pixels(1, images)) * images.channels, {32, 16}, 10, kRows, device);
      },
      [&] { return MakeLenet(images, 10, kRows, device); },
      [&] { return MakeResnet20(images, 10, kRows, device); },
      [&] { return MakeBottlenecks(images, 10, device); },
  };
  const Floats x = RandomFloats(Pixels(kRows, images) * static_cast<size_t>(images.channels), 1);
  const std::vector<int32_t> labels = {1, 5, 9};
  const auto input = device.Allocate(x.size()), targets = device.Allocate(labels.size());
  device.Upload(x.data(), input.get(), x.size() * sizeof(float));
  device.Upload(labels.data(), targets.get(), labels.size() * sizeof(int32_t));
  device.Wait();
  const auto loss = std::static_pointer_cast<double>(device.AllocateHost(sizeof(double)));
  for (const auto& make : makers) {
    for (size_t nan_in = 0; nan_in == 0 || nan_in <= make()->parameters().size(); ++nan_in) {
      const std::unique_ptr<Model> model = make();
      std::vector<std::shared_ptr<float>> memory;
      std::vector<float*> values, grads;
      for (const ParameterSpec& spec : model->parameters()) {
        for (std::vector<float*>* list : {&values, &grads}) {
          memory.push_back(device.Allocate(spec.count()));
          list->push_back(memory.back().get());
        }
      }
      model->Bind(values, grads);
      model->Initialize(1);
      const auto pass = [&] {
        const ddp::Autocast scope(ddp::Device::Kind::kCpu, ProductsOf(autocast));
        const absl::Span<const float> logits = model->Forward(input.get(), kRows);
        device.CrossEntropy(logits.data(), reinterpret_cast<const int32_t*>(targets.get()), kRows, 10,
                            model->output_grad().data(), {}, loss.get());
        device.Wait();
        return *loss;
      };
      if (nan_in > 0) {
        const float nan = NAN;
        device.Upload(&nan, values[nan_in - 1], sizeof nan);
        device.Wait();
      }
      INFO(model->parameters().size() << " parameters, a NaN in "
                                      << (nan_in == 0 ? "none" : model->parameters()[nan_in - 1].name));
      model->SetTraining(false);
      CHECK(std::isnan(pass()) == (nan_in > 0));
      model->SetTraining(true);
      CHECK(std::isnan(pass()) == (nan_in > 0));
    }
  }
}

}  // namespace

void CheckLayersKeepNan(Device& device, Element element) { CheckLayers(device, {.element = element}); }

void CheckModelsKeepNan(Device& device) { CheckModels(device, false); }

void CheckCpuKeepsNanInBfloat16() {
  CheckLayers(Cpu(), {.autocast = true});
  CheckModels(Cpu(), true);
}

}  // namespace nn::testing
