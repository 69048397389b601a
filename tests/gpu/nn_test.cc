// The example layers on a real GPU give what they give on the CPU.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "examples/nn/device.h"
#include "examples/nn/model.h"
#include "tests/support/catch.h"

namespace nn {
namespace {

using ddp::testing::Approx;

// Random numbers, the same in each run.
std::vector<float> Numbers(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> numbers(count);
  for (float& x : numbers) x = static_cast<float>(random() * 0x1p-31 - 1);
  return numbers;
}

void RequireNear(const std::vector<float>& got, const std::vector<float>& want, float tolerance) {
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    INFO("element " << i << " of " << got.size());
    REQUIRE(std::fabs(got[i] - want[i]) <= tolerance * std::max(1.0f, std::fabs(want[i])));
  }
}

// A model on a device with its memory.
struct Placed {
  Placed(Device& device_, const std::vector<int>& hidden, int max_batch)
      : device(device_), model(MakeMlp(30, hidden, 10, max_batch, device)) {
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
  // The loss of a batch; leaves its gradients, announced in the order told.
  double Pass(const std::vector<float>& x, const std::vector<int32_t>& labels, bool accumulate, const LossOptions& o,
              std::vector<size_t>* order) {
    const int rows = static_cast<int>(labels.size());
    const auto input = device.Allocate(x.size());
    const auto targets = device.Allocate(labels.size());
    device.Upload(x.data(), input.get(), x.size() * sizeof(float));
    device.Upload(labels.data(), targets.get(), labels.size() * sizeof(int32_t));
    const auto loss = std::static_pointer_cast<double>(device.AllocateHost(sizeof(double)));
    const auto hits = std::static_pointer_cast<int64_t>(device.AllocateHost(sizeof(int64_t)));
    const absl::Span<const float> logits = model->Forward(input.get(), rows);
    const auto* const where = reinterpret_cast<const int32_t*>(targets.get());
    device.CountHits(logits.data(), where, rows, 10, hits.get());
    device.CrossEntropy(logits.data(), where, rows, 10, model->output_grad().data(), o, loss.get());
    model->Backward([&](size_t i) { order->push_back(i); }, accumulate);
    device.Wait();
    hit = *hits;
    return *loss;
  }

  Device& device;
  std::unique_ptr<Model> model;
  std::vector<std::shared_ptr<float>> values, grads;
  int64_t hit = 0;
};

TEST_CASE("a model's losses and gradients are the CPU's") {
  for (const bool tf32 : {false, true}) {
    const std::unique_ptr<Device> gpu = OpenCuda(0, tf32);
    for (const std::vector<int>& hidden : {std::vector<int>{}, {17}, {64, 33}, {128, 128}}) {
      Placed cpu_model(Cpu(), hidden, 24), gpu_model(*gpu, hidden, 24);
      for (const size_t rows : {size_t{24}, size_t{1}, size_t{7}}) {
        for (const bool accumulate : {false, true}) {
          const std::vector<float> x = Numbers(rows * 30, static_cast<uint32_t>(rows));
          std::vector<int32_t> labels(rows);
          for (size_t i = 0; i < rows; ++i) labels[i] = static_cast<int32_t>(i * 3 % 10);
          const LossOptions options{.label_smoothing = accumulate ? 0.1f : 0, .grad_scale = 0.5f};
          std::vector<size_t> order, gpu_order;
          const double want = cpu_model.Pass(x, labels, accumulate, options, &order);
          const double got = gpu_model.Pass(x, labels, accumulate, options, &gpu_order);
          const float tolerance = tf32 ? 1e-2f : 1e-5f;
          CHECK(got == Approx(want).epsilon(tf32 ? 1e-2 : 1e-5));
          if (!tf32) CHECK(gpu_model.hit == cpu_model.hit);
          CHECK(std::is_sorted(gpu_order.rbegin(), gpu_order.rend()));
          CHECK(gpu_order == order);
          for (size_t p = 0; p < cpu_model.grads.size(); ++p) {
            const size_t count = cpu_model.model->parameters()[p].count();
            RequireNear(gpu_model.Get(gpu_model.grads[p], count), cpu_model.Get(cpu_model.grads[p], count), tolerance);
          }
        }
      }
    }
  }
}

TEST_CASE("optimizers step as the CPU's do, and not at all where they are told to skip") {
  const std::unique_ptr<Device> gpu = OpenCuda(0, false);
  constexpr size_t kCount = 1003;
  const auto skip = std::static_pointer_cast<uint32_t>(gpu->AllocateHost(sizeof(uint32_t)));
  for (int kind = 0; kind < 4; ++kind) {
    const auto make = [&](Device& device) {
      if (kind == 0) return device.MakeSgd(kCount, {.lr = 0.1});
      if (kind == 1) return device.MakeSgd(kCount, {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01});
      return device.MakeAdam(kCount, {.lr = 0.01, .weight_decay = 0.02, .decoupled = kind == 3});
    };
    const std::unique_ptr<Optimizer> here = make(Cpu()), there = make(*gpu);
    there->set_skip(skip.get());
    std::vector<float> value = Numbers(kCount, 1), got(kCount);
    const auto on_gpu = gpu->Allocate(kCount), grad_on_gpu = gpu->Allocate(kCount);
    gpu->Upload(value.data(), on_gpu.get(), kCount * sizeof(float));
    for (int step = 0; step < 6; ++step) {
      const std::vector<float> grad = Numbers(kCount, static_cast<uint32_t>(10 + step));
      gpu->Upload(grad.data(), grad_on_gpu.get(), kCount * sizeof(float));
      gpu->Wait();
      *skip = step % 2;
      if (*skip == 0) here->Step(absl::MakeSpan(value), grad);
      there->Step({on_gpu.get(), kCount}, {grad_on_gpu.get(), kCount});
      gpu->Download(on_gpu.get(), got.data(), kCount * sizeof(float));
      RequireNear(got, value, 1e-5f);
    }
    REQUIRE(there->state().size() == here->state().size());
    for (size_t s = 0; s < here->state().size(); ++s) {
      CHECK(there->state()[s].name == here->state()[s].name);
      gpu->Download(there->state()[s].data.data(), got.data(), kCount * sizeof(float));
      RequireNear(got, {here->state()[s].data.begin(), here->state()[s].data.end()}, 1e-5f);
    }
  }
}

TEST_CASE("a GPU that is not there is an error that says what to do") {
  std::string said;
  try {
    OpenCuda(99, false);
  } catch (const DeviceError& e) {
    said = e.what();
  }
  CHECK(said.find("GPU 99") != std::string::npos);
  CHECK(said.find("CUDA_VISIBLE_DEVICES") != std::string::npos);
}

}  // namespace
}  // namespace nn
