// SPDX-License-Identifier: Apache-2.0
// Each layer of the examples' convolutional models gives on a real GPU what it gives on the CPU.
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "examples/nn/cuda_image_kernels.h"
#include "examples/nn/device.h"
#include "tests/gpu/placed.h"
#include "tests/support/catch.h"

namespace nn {
namespace {

using MakeLayer = std::function<NamedLayer(ImageLayers&)>;

// A loss of what comes out of the layers, as plain rows, and all gradients.
std::vector<float> Through(Device& device, const ImageShape& shape, const std::vector<MakeLayer>& each,
                           const ImageShape& out, int rows) {
  Placed placed(device, [&](Device&) {
    const std::unique_ptr<ImageLayers> make = device.MakeImageLayers(rows);
    std::vector<NamedLayer> layers;
    for (const MakeLayer& layer : each) layers.push_back(layer(*make));
    layers.push_back({"flat", make->MakeFlatten(out)});
    return std::make_unique<Model>(std::move(layers), rows, device);
  });
  const int classes = out.channels * out.height * out.width;
  std::vector<size_t> order;
  const std::vector<float> x = Numbers(static_cast<size_t>(rows * shape.channels * shape.height * shape.width), 5);
  std::vector<int32_t> labels(static_cast<size_t>(rows));
  for (size_t r = 0; r < labels.size(); ++r)
    labels[r] = static_cast<int32_t>((7 * r + 1) % static_cast<size_t>(classes));
  std::vector<float> results = {static_cast<float>(placed.Pass(x, labels, false, {}, &order, classes))};
  for (size_t p = 0; p < placed.grads.size(); ++p) {
    const std::vector<float> grad = placed.Get(placed.grads[p], placed.model->parameters()[p].count());
    results.insert(results.end(), grad.begin(), grad.end());
  }
  return results;
}

// Of one layer behind a convolution of single pixels.
std::vector<float> ThroughLayer(Device& device, const ImageShape& shape, const MakeLayer& layer, const ImageShape& out,
                                int rows = 3) {
  const Conv2dOptions pixels = {.in = shape, .outputs = shape.channels, .kernel = 1, .in_layout = Layout::kPlain};
  const auto first = [&](ImageLayers& make) { return NamedLayer{"in", make.MakeConv2d(pixels)}; };
  return Through(device, shape, {first, layer}, out, rows);
}

// What fits into the registers of a GPU is normalised by one launch: 2, 4 or 8 vectors a thread on one that is large.
TEST_CASE("batch normalisation of few and of many numbers is the CPU's") {
  for (const auto& [element, precision] : {std::pair(Element::kFloat32, 1e-4), std::pair(Element::kFloat16, 5e-2)}) {
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.activations = element});
    for (const ImageShape& shape : {ImageShape{16, 32, 31}, ImageShape{64, 9, 7}}) {
      const auto norm = [&](ImageLayers& make) {
        return NamedLayer{"norm", make.MakeBatchNorm2d(shape, Activation::kRelu)};
      };
      for (const int rows : {2, 17, 48, 100, 250}) {
        INFO("activations " << static_cast<int>(element) << ", " << shape.channels << " channels, " << rows << " rows");
        CHECK(Distance(ThroughLayer(*gpu, shape, norm, shape, rows), ThroughLayer(Cpu(), shape, norm, shape, rows)) <=
              precision);
      }
    }
  }
}

TEST_CASE("the first convolution of a model, of few channels, is the CPU's") {
  for (const auto& [element, precision] :
       {std::pair(Element::kFloat32, 1e-5), std::pair(Element::kFloat16, 1e-2), std::pair(Element::kBFloat16, 5e-2)}) {
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.activations = element});
    for (const auto& [channels, kernel] : {std::pair(1, 3), std::pair(3, 3), std::pair(1, 5)}) {
      for (const int outputs : {16, 32}) {
        for (const int padding : {0, 1}) {
          const bool bias = outputs != 16;
          const Conv2dOptions options = {.in = {channels, 13, 9},
                                         .outputs = outputs,
                                         .kernel = kernel,
                                         .padding = padding,
                                         .bias = bias,
                                         .activation = bias ? Activation::kRelu : Activation::kNone,
                                         .in_layout = Layout::kPlain};
          INFO("activations " << static_cast<int>(element) << ", " << channels << " channels, " << kernel << ", "
                              << outputs << " outputs, padding " << padding);
          const auto first = [&](ImageLayers& make) { return NamedLayer{"in", make.MakeConv2d(options)}; };
          CHECK(Distance(Through(*gpu, options.in, {first}, options.out(), 5),
                         Through(Cpu(), options.in, {first}, options.out(), 5)) <= precision);
        }
      }
    }
  }
}

// cuDNN has it as a convolution with stride 1 of images with more channels.
TEST_CASE("a first convolution with a stride is the CPU's") {
  struct Shape {
    ImageShape in;
    int kernel, stride, padding;
  };
  for (const auto& [element, precision] :
       {std::pair(Element::kFloat32, 1e-5), std::pair(Element::kFloat16, 1e-2), std::pair(Element::kBFloat16, 5e-2)}) {
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.activations = element});
    for (const Shape& shape : {Shape{{3, 20, 14}, 7, 2, 3}, Shape{{3, 13, 9}, 3, 2, 1}, Shape{{1, 15, 16}, 5, 3, 2},
                               Shape{{3, 16, 12}, 4, 4, 0}, Shape{{5, 9, 10}, 1, 2, 0}, Shape{{2, 11, 12}, 2, 2, 1}}) {
      const Conv2dOptions options = {.in = shape.in,
                                     .outputs = 16,
                                     .kernel = shape.kernel,
                                     .stride = shape.stride,
                                     .padding = shape.padding,
                                     .bias = shape.stride == 2,
                                     .in_layout = Layout::kPlain};
      INFO("activations " << static_cast<int>(element) << ", kernel " << shape.kernel << ", stride " << shape.stride
                          << ", padding " << shape.padding);
      const auto first = [&](ImageLayers& make) { return NamedLayer{"in", make.MakeConv2d(options)}; };
      CHECK(Distance(Through(*gpu, options.in, {first}, options.out(), 5),
                     Through(Cpu(), options.in, {first}, options.out(), 5)) <= precision);
    }
  }
}

// What tensor cores compute without cuDNN: the weight's gradient of all of these, and the rest from 16 channels to 16.
TEST_CASE("convolutions of few channels are the CPU's") {
  struct Shape {
    ImageShape in;
    int outputs, stride, padding;
  };
  for (const auto& [element, precision] :
       {std::pair(Element::kFloat32, 2e-3), std::pair(Element::kFloat16, 1e-2), std::pair(Element::kBFloat16, 5e-2)}) {
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.tf32 = true, .activations = element});
    for (const Shape& shape : {Shape{{16, 13, 8}, 16, 1, 1}, Shape{{16, 9, 26}, 16, 1, 0}, Shape{{16, 5, 15}, 16, 2, 1},
                               Shape{{16, 12, 16}, 32, 2, 1}, Shape{{32, 7, 10}, 64, 1, 0}, Shape{{64, 8, 8}, 64, 1, 1},
                               Shape{{64, 2, 24}, 16, 1, 1}, Shape{{32, 16, 16}, 32, 1, 1}}) {
      const Conv2dOptions options = {.in = shape.in,
                                     .outputs = shape.outputs,
                                     .kernel = 3,
                                     .stride = shape.stride,
                                     .padding = shape.padding,
                                     .bias = shape.stride == 1};
      const auto layer = [&](ImageLayers& make) { return NamedLayer{"conv", make.MakeConv2d(options)}; };
      for (const int rows : {1, shape.in.channels == 64 ? 40 : 150}) {
        INFO("activations " << static_cast<int>(element) << ", " << shape.in.channels << " to " << shape.outputs
                            << " channels, " << shape.in.width << " columns, stride " << shape.stride << ", padding "
                            << shape.padding << ", " << rows << " rows");
        CHECK(Distance(ThroughLayer(*gpu, shape.in, layer, options.out(), rows),
                       ThroughLayer(Cpu(), shape.in, layer, options.out(), rows)) <= precision);
      }
    }
  }
}

TEST_CASE("pooling and batch normalisation: every layer by itself is the CPU's") {
  const ImageShape shape = {16, 7, 5};
  // Rounding makes other pixels the largest of their window.
  for (const auto& [element, precision] :
       {std::pair(Element::kFloat32, 1e-5), std::pair(Element::kFloat16, 5e-2), std::pair(Element::kBFloat16, 0.3)}) {
    INFO("activations " << static_cast<int>(element));
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.activations = element});
    for (const PoolKind kind : {PoolKind::kMax, PoolKind::kAverage}) {
      for (const Activation activation : {Activation::kNone, Activation::kRelu}) {
        for (const auto& [height, width] : {std::pair(2, 2), std::pair(7, 5), std::pair(3, 1)}) {
          const Pool2dOptions options = {kind, shape, height, width, activation};
          INFO("windows of " << options.height << " x " << options.width);
          const auto pool = [&](ImageLayers& make) { return NamedLayer{"pool", make.MakePool2d(options)}; };
          CHECK(Distance(ThroughLayer(*gpu, shape, pool, options.out()),
                         ThroughLayer(Cpu(), shape, pool, options.out())) <= precision);
        }
      }
    }
    for (const Activation activation : {Activation::kNone, Activation::kRelu}) {
      const Pool2dOptions overlapping = {
          .in = shape, .height = 3, .width = 3, .activation = activation, .stride = 2, .padding = 1};
      const auto pool = [&](ImageLayers& make) { return NamedLayer{"pool", make.MakePool2d(overlapping)}; };
      CHECK(Distance(ThroughLayer(*gpu, shape, pool, overlapping.out()),
                     ThroughLayer(Cpu(), shape, pool, overlapping.out())) <= precision);
    }
    for (const Activation activation : {Activation::kNone, Activation::kRelu}) {
      const auto norm = [&](ImageLayers& make) { return NamedLayer{"norm", make.MakeBatchNorm2d(shape, activation)}; };
      CHECK(Distance(ThroughLayer(*gpu, shape, norm, shape), ThroughLayer(Cpu(), shape, norm, shape)) <= precision);
    }
  }
}

// With many rows, numbers do not fit into the GPU's registers: then convolutions may make the sums of the
// normalisation.
TEST_CASE("bottlenecks with an identity, a projection and a stride are the CPU's") {
  struct Block {
    ImageShape in;
    int width, stride, rows;
  };
  for (const auto& [element, precision] :
       {std::pair(Element::kFloat32, 1e-3), std::pair(Element::kFloat16, 5e-2), std::pair(Element::kBFloat16, 0.3)}) {
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.activations = element});
    for (const Block& block : {Block{{64, 7, 5}, 16, 1, 3}, Block{{16, 7, 5}, 16, 1, 3}, Block{{32, 7, 6}, 16, 2, 3},
                               Block{{128, 16, 18}, 32, 1, 500}, Block{{64, 16, 18}, 64, 2, 260}}) {
      INFO("activations " << static_cast<int>(element) << ", " << block.in.channels << " channels, stride "
                          << block.stride << ", " << block.rows << " rows");
      const BottleneckOptions options = {.in = block.in, .width = block.width, .stride = block.stride};
      const auto layer = [&](ImageLayers& make) { return NamedLayer{"block", make.MakeBottleneck(options)}; };
      CHECK(Distance(ThroughLayer(*gpu, block.in, layer, options.out(), block.rows),
                     ThroughLayer(Cpu(), block.in, layer, options.out(), block.rows)) <= precision);
    }
  }
}

// The first half of the channels is 0 on the average; the other is around 100, with differences of less than 1.
TEST_CASE("moments are those of the sums that are given, and of x itself where these have lost the variance") {
  constexpr int kChannels = 256;  // of two groups, whose blocks know nothing of each other
  constexpr size_t kPixels = 3000;
  std::vector<__half> x(kPixels * kChannels);
  const std::vector<float> numbers = Numbers(x.size(), 11);
  for (size_t i = 0; i < x.size(); ++i) {
    const bool far = i % kChannels >= kChannels / 2;
    x[i] = __float2half(far ? 100 + std::round(8 * numbers[i]) / 16 : numbers[i]);
  }
  // Of other numbers, so that one sees whose moments come out: the second half's are too far from 0.
  std::vector<float> sums(2 * kChannels);
  for (size_t c = 0; c < kChannels; ++c) {
    const float mean = c < kChannels / 2 ? 0.25f : 50;
    sums[c] = mean * kPixels;
    sums[kChannels + c] = (mean * mean + 4) * kPixels;
  }
  const std::unique_ptr<Device> gpu = OpenCuda(0, {});
  const auto on_gpu = [&](const void* from, size_t bytes) {
    auto memory = gpu->Allocate(bytes / sizeof(float));
    gpu->Upload(from, memory.get(), bytes);
    return memory;
  };
  const auto given = on_gpu(x.data(), x.size() * sizeof(__half)), made = on_gpu(sums.data(), 2 * kChannels * 4);
  const std::vector<float> zeros(cuda::ColumnScratchFloats(kChannels) + cuda::kColumnTickets + 4 * kChannels);
  const auto memory = on_gpu(zeros.data(), zeros.size() * sizeof(float));
  float* const own = memory.get() + cuda::ColumnScratchFloats(kChannels) + cuda::kColumnTickets;
  const cuda::ColumnScratch scratch = {
      memory.get(), reinterpret_cast<unsigned*>(memory.get() + cuda::ColumnScratchFloats(kChannels))};
  for (const bool with_sums : {false, true}) {
    INFO("sums " << with_sums);
    gpu->Upload(zeros.data(), own, 4 * kChannels * sizeof(float));
    gpu->Wait();
    CHECK(cuda::BatchNormMoments(Element::kFloat16, given.get(), with_sums ? made.get() : nullptr, kPixels, kChannels,
                                 0, 0.5f, {own, own + kChannels}, {own + 2 * kChannels, own + 3 * kChannels}, scratch,
                                 nullptr) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    std::vector<float> moments(4 * kChannels);
    gpu->Download(own, moments.data(), moments.size() * sizeof(float));
    for (size_t c = 0; c < kChannels; ++c) {
      double mean = 0.25, variance = 4;
      if (!with_sums || c >= kChannels / 2) {
        double sum = 0, squares = 0;
        for (size_t p = 0; p < kPixels; ++p) sum += __half2float(x[p * kChannels + c]);
        mean = sum / kPixels;
        for (size_t p = 0; p < kPixels; ++p) squares += std::pow(__half2float(x[p * kChannels + c]) - mean, 2);
        variance = squares / kPixels;
      }
      INFO("channel " << c);
      CHECK(std::abs(moments[c] - mean) <= 1e-5 * std::abs(mean) + 1e-5);
      CHECK(std::abs(moments[kChannels + c] * std::sqrt(variance) - 1) <= 1e-4);
      CHECK(std::abs(moments[2 * kChannels + c] - mean / 2) <= 1e-5 * std::abs(mean) + 1e-5);
      CHECK(std::abs(moments[3 * kChannels + c] / (variance / 2) - 1) <= 1e-3);
    }
  }
}

TEST_CASE("dropout leaves out what it does on the CPU, in evaluation nothing") {
  constexpr int kSize = 999, kRows = 3;
  const std::unique_ptr<Device> gpu = OpenCuda(0, {});
  const std::vector<float> x = Numbers(kRows * kSize, 5);
  const auto run = [&](Device& device) {
    const std::unique_ptr<Layer> layer = device.MakeImageLayers(kRows)->MakeDropout(kSize, 0.3, 7);
    const auto in = device.Allocate(x.size()), out = device.Allocate(x.size());
    device.Upload(x.data(), in.get(), x.size() * sizeof(float));
    std::vector<float> results;
    const auto take = [&](const std::shared_ptr<float>& memory) {
      std::vector<float> host(x.size());
      device.Download(memory.get(), host.data(), host.size() * sizeof(float));
      results.insert(results.end(), host.begin(), host.end());
    };
    for (const bool training : {true, true, false}) {
      layer->SetTraining(training);
      layer->Forward(in.get(), out.get(), kRows);
      take(out);
      if (!training) continue;
      layer->Backward(in.get(), out.get(), in.get(), out.get(), kRows, false, [](size_t) {});
      take(out);
    }
    return results;
  };
  const std::vector<float> there = run(*gpu);
  CHECK(there == run(Cpu()));
  CHECK(std::equal(x.begin(), x.end(), there.end() - static_cast<std::ptrdiff_t>(x.size())));
}

}  // namespace
}  // namespace nn
