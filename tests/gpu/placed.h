// SPDX-License-Identifier: Apache-2.0
// Models with their memory on a device, for comparisons with the CPU.
#ifndef TESTS_GPU_PLACED_H_
#define TESTS_GPU_PLACED_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "examples/nn/cnn.h"
#include "examples/nn/device.h"
#include "examples/nn/model.h"

namespace nn {

// Random numbers, the same in each run.
inline std::vector<float> Numbers(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> numbers(count);
  for (float& x : numbers) x = static_cast<float>(random() * 0x1p-31 - 1);
  return numbers;
}

// A model on a device with its memory.
struct Placed {
  using Make = std::function<std::unique_ptr<Model>(Device&)>;

  Placed(Device& device_, const std::vector<int>& hidden, int max_batch)
      : Placed(device_, [&](Device& d) { return MakeMlp(30, hidden, 10, max_batch, d); }) {}
  Placed(Device& device_, const Make& make) : device(device_), model(make(device)) {
    for (const ParameterSpec& spec : model->parameters()) {
      values.push_back(device.Allocate(spec.count()));
      grads.push_back(device.Allocate(spec.count()));
    }
    std::vector<float*> v, g;
    for (const auto& p : values) v.push_back(p.get());
    for (const auto& p : grads) g.push_back(p.get());
    model->Bind(v, g);
    model->Initialize(3);
  }
  std::vector<float> Get(const std::shared_ptr<float>& memory, size_t count) {
    std::vector<float> host(count);
    device.Download(memory.get(), host.data(), count * sizeof(float));
    return host;
  }
  // The loss of a batch; leaves its gradients, announced in the order told. Without one there is no backward pass.
  double Pass(const std::vector<float>& x, const std::vector<int32_t>& labels, bool accumulate, const LossOptions& o,
              std::vector<size_t>* order, int classes = 10) {
    const int rows = static_cast<int>(labels.size());
    const auto input = device.Allocate(x.size());
    const auto targets = device.Allocate(labels.size());
    device.Upload(x.data(), input.get(), x.size() * sizeof(float));
    device.Upload(labels.data(), targets.get(), labels.size() * sizeof(int32_t));
    const auto loss = std::static_pointer_cast<double>(device.AllocateHost(sizeof(double)));
    const auto hits = std::static_pointer_cast<int64_t>(device.AllocateHost(sizeof(int64_t)));
    const absl::Span<const float> logits = model->Forward(input.get(), rows);
    const auto* const where = reinterpret_cast<const int32_t*>(targets.get());
    device.CountHits(logits.data(), where, rows, classes, hits.get());
    device.CrossEntropy(logits.data(), where, rows, classes, model->output_grad().data(), o, loss.get());
    if (order != nullptr) model->Backward([&](size_t i) { order->push_back(i); }, accumulate);
    device.Wait();
    hit = *hits;
    return *loss;
  }
  double Loss(const std::vector<float>& x, const std::vector<int32_t>& labels) {
    return Pass(x, labels, false, {}, nullptr);
  }

  Device& device;
  std::unique_ptr<Model> model;
  std::vector<std::shared_ptr<float>> values, grads;
  int64_t hit = 0;
};

// How far numbers are from others, relative to the root of those' mean square.
inline double Distance(const std::vector<float>& got, const std::vector<float>& want) {
  double apart = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    apart += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(apart / std::max(size, 1e-30));
}

}  // namespace nn

#endif  // TESTS_GPU_PLACED_H_
