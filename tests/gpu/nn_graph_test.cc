// SPDX-License-Identifier: Apache-2.0
// Steps of the example layers as CUDA graphs, on a real GPU.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "examples/nn/cnn.h"
#include "examples/nn/device.h"
#include "examples/nn/model.h"
#include "tests/gpu/placed.h"
#include "tests/support/catch.h"

namespace nn {
namespace {

constexpr int kRows = 16, kClasses = 10, kSteps = 12;

struct Training {
  bool graphs = false, adam = false;
  CudaOptions options;
  std::vector<double> losses = {};
  std::vector<float> values = {};

  // Batches in two slots in turn, each with a graph of its own, and a learning rate that changes in every step.
  void Run(const Placed::Make& make) {
    const std::unique_ptr<Device> gpu = OpenCuda(0, options);
    const std::unique_ptr<Model> model = make(*gpu);
    std::vector<size_t> offsets;
    size_t count = 0;
    for (const ParameterSpec& spec : model->parameters()) {
      offsets.push_back(count);
      count += (spec.count() + 63) / 64 * 64;
    }
    const auto value = gpu->Allocate(count), grad = gpu->Allocate(count);
    std::vector<float*> v, g;
    for (const size_t offset : offsets) v.push_back(value.get() + offset), g.push_back(grad.get() + offset);
    model->Bind(v, g);
    model->Initialize(5);
    const auto optimizer = adam ? gpu->MakeAdam(count, {.weight_decay = 0.01, .decoupled = true})
                                : gpu->MakeSgd(count, {.momentum = 0.9, .weight_decay = 0.01});
    optimizer->set_clip_norm(0.5);
    const size_t floats = static_cast<size_t>(kRows) * static_cast<size_t>(model->input_size());
    const size_t bytes = (floats + kRows) * sizeof(float);
    const auto ring = std::static_pointer_cast<double>(gpu->AllocateHost(4 * sizeof(double)));
    const auto calls = gpu->Allocate(2);
    std::shared_ptr<float> batch[Device::kSlots];
    std::shared_ptr<void> host[Device::kSlots];
    std::unique_ptr<Graph> graph[Device::kSlots];
    for (int slot = 0; slot < Device::kSlots; ++slot) {
      batch[slot] = gpu->Allocate(floats + kRows);
      host[slot] = gpu->AllocateHost(bytes);
    }
    for (int s = 0; s < kSteps; ++s) {
      const int slot = s % Device::kSlots;
      if (s >= Device::kSlots) gpu->Await(slot);
      auto* const pixels = static_cast<float*>(host[slot].get());
      const std::vector<float> numbers = Numbers(floats, static_cast<uint32_t>(s));
      std::copy(numbers.begin(), numbers.end(), pixels);
      auto* const labels = reinterpret_cast<int32_t*>(pixels + floats);
      for (int r = 0; r < kRows; ++r) labels[r] = (r * 7 + s) % kClasses;
      gpu->UploadTo(slot, pixels, batch[slot].get(), bytes);
      optimizer->set_lr((adam ? 1e-3 : 0.05) / (1 + s));
      const auto step = [&] {
        const absl::Span<const float> logits = model->Forward(batch[slot].get(), kRows);
        gpu->CrossEntropy(logits.data(), reinterpret_cast<const int32_t*>(batch[slot].get() + floats), kRows, kClasses,
                          model->output_grad().data(), {},
                          LossRing(ring.get(), reinterpret_cast<uint64_t*>(calls.get()), 4));
        model->Backward([](size_t) {});
        optimizer->Step({value.get(), count}, {grad.get(), count});
        return true;
      };
      if (!graphs || s < 3) {
        step();
      } else {
        if (graph[slot] == nullptr) graph[slot] = gpu->Capture(step);
        graph[slot]->Launch();
      }
      gpu->Release(slot);
      if (s % 4 != 3) continue;
      gpu->Wait();
      losses.insert(losses.end(), ring.get(), ring.get() + 4);
    }
    CHECK(optimizer->steps() == kSteps);
    values.resize(count);
    gpu->Download(value.get(), values.data(), count * sizeof(float));
  }
};

}  // namespace

TEST_CASE("steps as graphs are what steps are, to the last bit") {
  const Placed::Make models[] = {
      [](Device& d) {
        return MakeMlp(300, std::vector<int>{64, 48}, kClasses, kRows, d);
      },
      [](Device& d) {
        return MakeLenet({1, 28, 28}, kClasses, kRows, d);
      },
      [](Device& d) {
        return MakeResnet20({3, 32, 32}, kClasses, kRows, d);
      },
  };
  for (const Placed::Make& model : models) {
    for (const Element element : {Element::kFloat32, Element::kFloat16}) {
      for (const bool adam : {false, true}) {
        INFO("model " << &model - models << ", " << (element == Element::kFloat32 ? "float32" : "float16")
                      << (adam ? ", adam" : ", sgd"));
        Training eager, replayed;
        eager.adam = replayed.adam = adam;
        eager.options = replayed.options = {.activations = element, .deterministic = true};
        replayed.graphs = true;
        eager.Run(model);
        replayed.Run(model);
        CHECK(std::all_of(eager.losses.begin(), eager.losses.end(), [](double x) { return std::isfinite(x); }));
        CHECK(eager.losses == replayed.losses);
        CHECK(eager.values == replayed.values);
      }
    }
  }
}

TEST_CASE("dropout leaves out other elements in every replay, as on the CPU") {
  constexpr int kSize = 999;
  const std::unique_ptr<Device> gpu = OpenCuda(0, {});
  const std::vector<float> x = Numbers(kRows * kSize, 5);
  std::vector<std::vector<float>> results[2];
  for (Device* const device : {gpu.get(), &Cpu()}) {
    const std::unique_ptr<Layer> layer = device->MakeImageLayers(kRows)->MakeDropout(kSize, 0.3, 7);
    const auto in = device->Allocate(x.size()), out = device->Allocate(x.size()), back = device->Allocate(x.size());
    device->Upload(x.data(), in.get(), x.size() * sizeof(float));
    device->Wait();
    const auto pass = [&] {
      layer->Forward(in.get(), out.get(), kRows);
      layer->Backward(in.get(), out.get(), in.get(), back.get(), kRows, false, [](size_t) {});
      return true;
    };
    std::unique_ptr<Graph> graph;
    for (int p = 0; p < 4; ++p) {
      if (p == 0 || device == &Cpu()) {
        pass();
      } else {
        if (graph == nullptr) graph = device->Capture(pass);
        graph->Launch();
      }
      for (const auto& memory : {out, back}) {
        std::vector<float> host(x.size());
        device->Download(memory.get(), host.data(), host.size() * sizeof(float));
        results[device == &Cpu() ? 1 : 0].push_back(std::move(host));
      }
    }
  }
  CHECK(results[0] == results[1]);
  CHECK(results[0][2] != results[0][4]);
}

TEST_CASE("a capture that is given up leaves the device as it was") {
  const std::unique_ptr<Device> gpu = OpenCuda(0, {});
  const auto memory = gpu->Allocate(64);
  const std::vector<float> x = Numbers(64, 1);
  CHECK(gpu->Capture([&] {
    gpu->AddScaled(memory.get(), memory.get(), 64, 2, gpu->stream());
    return false;
  }) == nullptr);
  CHECK_THROWS_AS(gpu->Capture([&]() -> bool { throw DeviceError("no"); }), DeviceError);
  gpu->Upload(x.data(), memory.get(), x.size() * sizeof(float));
  std::vector<float> got(64);
  gpu->Download(memory.get(), got.data(), got.size() * sizeof(float));
  CHECK(got == x);
}

}  // namespace nn
