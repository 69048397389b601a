// SPDX-License-Identifier: Apache-2.0
// The example layers on a real GPU give what they give on the CPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "examples/nn/cnn.h"
#include "examples/nn/device.h"
#include "examples/nn/model.h"
#include "tests/gpu/placed.h"
#include "tests/support/catch.h"
#include "tests/support/nan_cases.h"

namespace nn {
namespace {

using ddp::testing::Approx;

void RequireNear(const std::vector<float>& got, const std::vector<float>& want, float tolerance) {
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    INFO("element " << i << " of " << got.size());
    REQUIRE(std::fabs(got[i] - want[i]) <= tolerance * std::max(1.0f, std::fabs(want[i])));
  }
}

TEST_CASE("a model's losses and gradients are the CPU's") {
  for (const bool tf32 : {false, true}) {
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.tf32 = tf32});
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

struct Precise {
  CudaOptions options;
  // How far they may be from the CPU's. Normalisations of few pixels, one upon the other, enlarge what was rounded: of
  // the deep model.
  double loss, gradients, deep_gradients;
};

// Of two kinds of models, of images that are no multiple of anything, in batches of two sizes.
void CheckImageModel(const Placed::Make& make, const ImageShape& images, const Precise& precise, double tolerance) {
  const std::unique_ptr<Device> gpu = OpenCuda(0, precise.options);
  Placed cpu_model(Cpu(), make), gpu_model(*gpu, make);
  for (const size_t rows : {size_t{8}, size_t{3}}) {
    for (const bool accumulate : {false, true}) {
      INFO(rows << " rows" << (accumulate ? ", added up" : ""));
      const auto pixels = static_cast<size_t>(images.channels * images.height * images.width);
      const std::vector<float> x = Numbers(rows * pixels, static_cast<uint32_t>(rows));
      std::vector<int32_t> labels(rows);
      for (size_t i = 0; i < rows; ++i) labels[i] = static_cast<int32_t>(i * 3 % 10);
      std::vector<size_t> order, gpu_order;
      const double want = cpu_model.Pass(x, labels, accumulate, {}, &order);
      const double got = gpu_model.Pass(x, labels, accumulate, {}, &gpu_order);
      CHECK(got == Approx(want).epsilon(precise.loss));
      CHECK(gpu_order == order);
      for (size_t p = 0; p < cpu_model.grads.size(); ++p) {
        const ParameterSpec& spec = cpu_model.model->parameters()[p];
        INFO("gradient of " << spec.name);
        const std::vector<float> there = gpu_model.Get(gpu_model.grads[p], spec.count());
        CHECK(Distance(there, cpu_model.Get(cpu_model.grads[p], spec.count())) <= tolerance);
      }
      for (size_t b = 0; b < cpu_model.model->buffers().size(); ++b) {
        const LayerBuffer& buffer = cpu_model.model->buffers()[b];
        INFO("buffer " << buffer.name);
        std::vector<float> there(buffer.data.size());
        gpu->Download(gpu_model.model->buffers()[b].data.data(), there.data(), there.size() * sizeof(float));
        CHECK(Distance(there, {buffer.data.begin(), buffer.data.end()}) <= precise.gradients);
      }
    }
  }
  // Evaluation takes the running statistics.
  cpu_model.model->SetTraining(false);
  gpu_model.model->SetTraining(false);
  const auto pixels = static_cast<size_t>(images.channels * images.height * images.width);
  std::vector<size_t> order;
  const std::vector<float> x = Numbers(5 * pixels, 9);
  const double want = cpu_model.Loss(x, {1, 2, 3, 4, 5});
  CHECK(gpu_model.Loss(x, {1, 2, 3, 4, 5}) == Approx(want).epsilon(precise.loss));
}

TEST_CASE("convolutional models' losses, gradients and statistics are the CPU's, to their precision") {
  const Precise kinds[] = {
      {{}, 1e-5, 1e-4, 1e-3},
      {{.deterministic = true}, 1e-5, 1e-4, 1e-3},
      {{.tf32 = true}, 1e-2, 5e-2, 0.5},
      {{.activations = Element::kFloat16}, 1e-2, 5e-2, 0.5},
      {{.activations = Element::kBFloat16}, 5e-2, 0.3, 1},
  };
  for (const Precise& precise : kinds) {
    INFO("TF32 " << precise.options.tf32 << ", activations " << static_cast<int>(precise.options.activations));
    const ImageShape grey = {1, 13, 11}, colour = {3, 18, 14};
    CheckImageModel([&](Device& device) { return MakeLenet(grey, 10, 8, device); }, grey, precise, precise.gradients);
    CheckImageModel([&](Device& device) { return MakeResnet20(colour, 10, 8, device); }, colour, precise,
                    precise.deep_gradients);
  }
}

TEST_CASE("a model of linear layers has the CPU's losses in 16 bits, and its gradients with a loss scale") {
  for (const Element element : {Element::kFloat16, Element::kBFloat16}) {
    const double precision = element == Element::kFloat16 ? 4e-3 : 3e-2;
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.activations = element});
    const auto scale = std::static_pointer_cast<float>(gpu->AllocateHost(sizeof(float)));
    *scale = 1024;
    for (const std::vector<int>& hidden : {std::vector<int>{}, {17}, {64, 33}, {128, 128}}) {
      INFO("hidden layers: " << hidden.size());
      Placed cpu_model(Cpu(), hidden, 24), gpu_model(*gpu, hidden, 24);
      for (const bool accumulate : {false, true}) {
        const std::vector<float> x = Numbers(24 * 30, 4);
        std::vector<int32_t> labels(24);
        for (size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<int32_t>(i * 3 % 10);
        std::vector<size_t> order, gpu_order;
        const LossOptions options = {.loss_scale = scale.get()};
        const double want = cpu_model.Pass(x, labels, accumulate, options, &order);
        const double got = gpu_model.Pass(x, labels, accumulate, options, &gpu_order);
        CHECK(got == Approx(want).epsilon(precision));
        CHECK(gpu_order == order);
        for (size_t p = 0; p < cpu_model.grads.size(); ++p) {
          const size_t count = cpu_model.model->parameters()[p].count();
          // One ReLU that rounding turns on or off moves the gradients by as much as this.
          const double tolerance = hidden.empty() ? 2 * precision : 0.3;
          CHECK(Distance(gpu_model.Get(gpu_model.grads[p], count), cpu_model.Get(cpu_model.grads[p], count)) <=
                tolerance);
        }
      }
    }
  }
}

TEST_CASE("ResNet-50 evaluates as on the CPU") {
  const ImageShape images = {3, 40, 33};
  const auto make = [&](Device& device) { return MakeResnet50(images, 10, 4, device); };
  const std::unique_ptr<Device> gpu = OpenCuda(0, {});
  Placed cpu_model(Cpu(), make), gpu_model(*gpu, make);
  const std::vector<float> x = Numbers(4 * 3 * 40 * 33, 6);
  const std::vector<int32_t> labels = {1, 2, 3, 4};
  std::vector<size_t> order, gpu_order;
  const double want = cpu_model.Pass(x, labels, false, {}, &order);
  CHECK(gpu_model.Pass(x, labels, false, {}, &gpu_order) == Approx(want).epsilon(1e-3));
  CHECK(gpu_order == order);
  for (Placed* placed : {&cpu_model, &gpu_model}) placed->model->SetTraining(false);
  CHECK(gpu_model.Loss(x, labels) == Approx(cpu_model.Loss(x, labels)).epsilon(1e-3));
}

TEST_CASE("the loss of extreme logits is the CPU's") {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kMost = std::numeric_limits<float>::max();
  const std::unique_ptr<Device> gpu = OpenCuda(0, {});
  const std::vector<float> rows[] = {{1000, -1000, 0},  {kMost, -kMost, 0},    {2, -kInf, 1},
                                     {-kInf, -kInf, 3}, {-1e4f, -1e4f, -1e4f}, {1, NAN, 2}};
  for (const std::vector<float>& row : rows) {
    for (const int32_t label : {0, 1, 2}) {
      for (const float smoothing : {0.0f, 0.1f}) {
        INFO(row[0] << " " << row[1] << " " << row[2] << ", label " << label << ", smoothing " << smoothing);
        const auto run = [&](Device& device, std::vector<float>* grad) {
          const auto logits = device.Allocate(row.size()), where = device.Allocate(1),
                     out = device.Allocate(row.size());
          device.Upload(row.data(), logits.get(), row.size() * sizeof(float));
          device.Upload(&label, where.get(), sizeof label);
          const auto loss = std::static_pointer_cast<double>(device.AllocateHost(sizeof(double)));
          device.CrossEntropy(logits.get(), reinterpret_cast<const int32_t*>(where.get()), 1, 3, out.get(),
                              {.label_smoothing = smoothing}, loss.get());
          device.Wait();
          grad->resize(row.size());
          device.Download(out.get(), grad->data(), row.size() * sizeof(float));
          return *loss;
        };
        std::vector<float> want_grad, got_grad;
        const double want = run(Cpu(), &want_grad), got = run(*gpu, &got_grad);
        if (std::isfinite(want)) {
          CHECK(got == Approx(want).epsilon(1e-6));
        } else {
          CHECK(std::isnan(got) == std::isnan(want));
          CHECK(std::isinf(got) == std::isinf(want));
        }
        for (size_t i = 0; i < row.size(); ++i) {
          CHECK(std::isnan(got_grad[i]) == std::isnan(want_grad[i]));
          if (!std::isnan(want_grad[i])) CHECK(got_grad[i] == Approx(want_grad[i]).margin(1e-6));
        }
      }
    }
  }
}

TEST_CASE("NaN in, NaN out: every layer and every model") {
  for (const Element element : {Element::kFloat32, Element::kFloat16, Element::kBFloat16}) {
    INFO("activations " << static_cast<int>(element));
    const std::unique_ptr<Device> gpu = OpenCuda(0, {.activations = element});
    testing::CheckLayersKeepNan(*gpu, element);
    testing::CheckModelsKeepNan(*gpu);
  }
}

TEST_CASE("optimizers step as the CPU's do, clipped or not, and not at all where they are told to skip") {
  const std::unique_ptr<Device> gpu = OpenCuda(0, {});
  const auto skip = std::static_pointer_cast<uint32_t>(gpu->AllocateHost(sizeof(uint32_t)));
  const auto half = gpu->Allocate(1);
  const float inv_scale = 0.5f;
  gpu->Upload(&inv_scale, half.get(), sizeof inv_scale);
  // Without clipping, with, and where it changes nothing; then all of it with more gradients than the clipping has
  // threads.
  for (int kind = 0; kind < 24; ++kind) {
    const size_t count = kind < 12 ? 1003 : 300'001;
    const auto make = [&](Device& device) {
      std::unique_ptr<Optimizer> optimizer;
      if (kind % 4 == 0) optimizer = device.MakeSgd(count, {.lr = 0.1});
      if (kind % 4 == 1) optimizer = device.MakeSgd(count, {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01});
      if (kind % 4 > 1) {
        optimizer = device.MakeAdam(count, {.lr = 0.01, .weight_decay = 0.02, .decoupled = kind % 4 == 3});
      }
      optimizer->set_clip_norm(std::array{0.0, 2.0, 1000.0}[static_cast<size_t>(kind / 4 % 3)]);
      return optimizer;
    };
    const std::unique_ptr<Optimizer> here = make(Cpu()), there = make(*gpu);
    there->set_words({.inv_scale = kind % 2 == 0 ? nullptr : half.get(), .skip_step = skip.get()});
    here->set_grad_scale(kind % 2 == 0 ? 1 : inv_scale);
    std::vector<float> value = Numbers(count, 1), got(count);
    const auto on_gpu = gpu->Allocate(count), grad_on_gpu = gpu->Allocate(count);
    gpu->Upload(value.data(), on_gpu.get(), count * sizeof(float));
    for (int step = 0; step < 6; ++step) {
      const std::vector<float> grad = Numbers(count, static_cast<uint32_t>(10 + step));
      gpu->Upload(grad.data(), grad_on_gpu.get(), count * sizeof(float));
      gpu->Wait();
      *skip = step % 2;
      if (*skip == 0) here->Step(absl::MakeSpan(value), grad);
      there->Step({on_gpu.get(), count}, {grad_on_gpu.get(), count});
      gpu->Download(on_gpu.get(), got.data(), count * sizeof(float));
      RequireNear(got, value, 1e-5f);
    }
    REQUIRE(there->state().size() == here->state().size());
    for (size_t s = 0; s < here->state().size(); ++s) {
      CHECK(there->state()[s].name == here->state()[s].name);
      gpu->Download(there->state()[s].data.data(), got.data(), count * sizeof(float));
      RequireNear(got, {here->state()[s].data.begin(), here->state()[s].data.end()}, 1e-5f);
    }
  }
}

TEST_CASE("a GPU that is not there is an error that says what to do") {
  std::string said;
  try {
    OpenCuda(99, {});
  } catch (const DeviceError& e) {
    said = e.what();
  }
  CHECK(said.find("GPU 99") != std::string::npos);
  CHECK(said.find("CUDA_VISIBLE_DEVICES") != std::string::npos);
}

}  // namespace
}  // namespace nn
